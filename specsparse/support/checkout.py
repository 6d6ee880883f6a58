"""The git checkout that the package was imported from."""

import subprocess
from pathlib import Path


def git_commit() -> dict[str, object]:
    """Commit of the checkout that the package was imported from, and whether it had changes; empty elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {}
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
