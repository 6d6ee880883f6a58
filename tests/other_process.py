"""What code finds in a process of its own, for what JAX must know before it starts."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np


def found_by(code: str, *args: object, out: Path, env: dict[str, str], timeout: int = 170) -> dict[str, np.ndarray]:
    """The arrays that `code` saved in `out`, run with these arguments and variables; a warning there is an error."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        env={**os.environ, **paths, **env}, capture_output=True, text=True, timeout=timeout,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(out) as found:
        return dict(found)
