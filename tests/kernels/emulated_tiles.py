"""AMX's kernels over tiles in plain C++ (emulated_tiles.cc), for tests: compiled when one asks for them."""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.kernels.processor import cpu_info

NAME = "amx_emulated"
SOURCE = Path(__file__).with_suffix(".cc")
ROOT = SOURCE.parents[2]
CSRC = ROOT / "specsparse" / "kernels" / "csrc"
FLAGS = ("-std=c++17", "-O1", "-DNDEBUG", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-mavx2", "-mfma", "-mf16c",
         *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")))  # fmt: skip


def set_isa(name: str) -> None:
    """`cpu.set_isa`, after which `amx_emulated` is known too; raises UserError where there is no such thing."""
    if name == NAME:
        _add()
    cpu.set_isa(name)


@cache
def _add() -> None:
    if "avx512_vnni" not in cpu_info()["flags"] or not (main := cpu.library()):
        raise UserError("tiles are emulated beside native kernels of AVX-512")
    tiles = ctypes.CDLL(str(_built()))
    assert main.specsparse_add_ops(tiles.specsparse_emulated_tiles)


def _built() -> Path:
    """The compiled library: one for each state of the sources."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise UserError("tiles are emulated where there is a C++ compiler")
    headers = sorted([*CSRC.glob("*/*.h"), *CSRC.glob("*/*.inl")])
    text = b"".join(file.read_bytes() for file in (SOURCE, *headers)) + repr((compiler, FLAGS)).encode()
    out = ROOT / ".cache" / f"{NAME}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    out.parent.mkdir(exist_ok=True)
    with (out.parent / f"{NAME}.lock").open("w") as lock:  # another worker of the tests may be at it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            made = out.with_suffix(".tmp")
            subprocess.run([compiler, *FLAGS, f"-I{CSRC}", str(SOURCE), "-o", str(made)], check=True)
            made.rename(out)
    return out
