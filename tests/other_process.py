"""What code finds in a process of its own, for what JAX must know before it starts."""

import json
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


_IMPORTED = """
import contextlib, io, json, sys
from specsparse.cli.main import main
for argv in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main(argv)
    except SystemExit as stop:
        assert stop.code in (None, 0, 2)
    packages = {'jax', 'numpy', 'gguf', 'huggingface_hub', 'matplotlib', 'rich'} & set(sys.modules)
    print(json.dumps([sorted(packages), said.getvalue()]))
"""


def imported(*lines: list[str]) -> list[tuple[list[str], str]]:
    """Of the packages that take long: which ones a process holds after the answer to each command; and the answers."""
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, json.dumps(lines)], capture_output=True, text=True, check=True,
        env={**os.environ, **paths},
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
