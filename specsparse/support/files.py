"""Files and folders: where they lie, whether they may be written, and files that appear whole or not at all.

Text, JSON, arrays by name and trees of arrays are written through `replacing`. Nothing here imports jax before arrays
are asked for.
"""

import json
import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

from specsparse.errors import UserError, refuse
from specsparse.support.cgroup import memory_left

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]
"""An object as JSON has it: reports, records, a config.json. Its maker's docstring says what is in it."""
_HALF = re.compile("[\ud800-\udfff]")
_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError, MemoryError, RuntimeError,
    struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""Errors of zipfile, zlib and numpy for bytes that are no archive of arrays."""


# Folders, and the memory that files are loaded into.


def cache_dir() -> Path:
    """The folder for what can be made again: `SPECSPARSE_CACHE`, or one in the user's cache."""
    given = os.environ.get("SPECSPARSE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{base}/specsparse").expanduser()


def package_dir() -> Path:
    return Path(__file__).resolve().parents[1]


def package_line() -> str:
    """The package's folder, and a warning if another checkout lies in the current folder."""
    package, here = package_dir(), Path("specsparse").absolute()
    other = (here / "__init__.py").is_file() and not here.samefile(package)
    return f"{package}{f', not {here}' if other else ''}"


def conf_dir() -> Path:
    """The config folder: inside an installed package, or beside the package in a checkout."""
    package = package_dir()
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def git_commit() -> Json:
    """Commit of the package's checkout, and whether it had changes ("dirty"); {} if it is no checkout."""
    root = package_dir().parent
    if not (root / ".git").exists():
        return {}

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def size_text(nbytes: float) -> str:
    """Bytes for people: 3.8 GB, 325 MB, 12 kB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.{1 if nbytes < 10 * unit and name == 'GB' else 0}f} {name}"
    return f"{nbytes / 1e3:.0f} kB"


def memory_available() -> int | None:
    """Bytes of memory that a process can take now (/proc/meminfo and cgroups); None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if (left := memory_left()) is not None:
        found.append(left)
    return min(found, default=None)


def need_memory(what: str, nbytes: int, instead: str) -> None:
    """UserError if that memory is not there: a system without it ends the process without a word.

    `what` begins the message (`--shapes 4096x11008: 1.2 GB of ...`), and `instead` says what the user can do.
    """
    memory = memory_available()
    if memory is not None and nbytes > memory:
        there = f"the memory that is available, {size_text(memory)}"
        raise UserError(f"{what}: {size_text(nbytes)} do not fit into {there}: {instead}")


def need_disk(folder: Path, nbytes: int, instead: str) -> None:
    """UserError if the disk of a folder, which need not be there yet, has no room for so many bytes."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if nbytes > (free := shutil.disk_usage(there).free):
        sizes = f"{size_text(nbytes)} are needed on the disk of {there}, {size_text(free)} are free"
        raise UserError(f"{sizes}: {instead}")


def read_text(path: Path, label: object = None) -> str:
    """The text of a file; UserError, beginning with `label` or the path, if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{label or path}: cannot be read: {reason}") from None


def json_lines(path: Path, label: object = None) -> Iterator[tuple[str, Any]]:
    """(FILE:LINE, its value) of a file of JSON Lines, empty ones left out; UserError as `read_text`, or no JSON."""
    for i, line in enumerate(read_text(path, label).split("\n"), 1):  # not splitlines: JSON may hold U+2028
        if line.strip():
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{i}: not JSON ({error})") from None
            yield f"{path}:{i}", found


# Files to write.


def need_folder(path: str | os.PathLike[str]) -> None:
    """UserError if the folder of `path` is not there: a mistyped folder is not made."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise UserError(f"{path}: there is no folder {folder} to write it in")


def need_place(path: str | os.PathLike[str], *sources: str | os.PathLike[str] | None, picture: bool = False) -> None:
    """UserError if a file cannot be written, said before the work that fills it.

    Args:
        path: of the file; it is replaced if it is there, unless it is one of the sources or in one of them.
        sources: files that the work reads, and folders whose files it reads; None and other names are ignored.
        picture: whether a figure is written, which is a PNG and nothing else.
    """
    need_folder(path)
    path, folder = Path(path), Path(path).parent
    read = [there for source in map(Path, filter(None, sources)) for there in (source, source / path.name)]
    refuse({
        "is a folder; name a file to write": path.is_dir(),
        "figures are written as PNG; name a file that ends in .png": picture and path.suffix.lower() != ".png",
        f"cannot be written: the folder {folder} is not writable here": not os.access(folder, os.W_OK),
        "is a file that is read; give another file to write":
            path.is_file() and any(there.is_file() and path.samefile(there) for there in read),
    }, path)  # fmt: skip


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[Path]:
    """An empty file that becomes `path` when the block ends without an error, and leaves nothing behind otherwise.
    UserError: it cannot be written: the folder, the disk."""
    path, temporary = Path(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        os.close(handle)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's file is the owner's alone
        os.replace(temporary, path)
    except OSError as error:
        raise unwritten(path, error) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomically(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """As `replacing`, but yields the new file opened for binary writing."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield file


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Adds a line to a file, or UserError. On a full disk nothing is written, and no empty file is left behind."""
    path = Path(path)
    try:
        with path.open("ab", buffering=0) as file:
            before, text = file.tell(), f"{line}\n".encode()
            try:
                while text:
                    text = text[file.write(text) :]
            except OSError:
                file.truncate(before)
                if not before:
                    path.unlink()
                raise
    except OSError as error:
        raise unwritten(path, error) from None


def unwritten(what: object, error: OSError) -> UserError:
    return UserError(f"{what}: cannot be written: {error.strerror or error}; make room, or write it elsewhere")


def write_atomically(path: Path, text: str) -> None:
    """Writes a text, or UserError; a reader (or a killed run) sees the old content or the new one, never half of it.

    Half a surrogate pair, as a file name that is no UTF-8 has, is written as a question mark.
    """
    with atomically(path) as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        os.fsync(file.fileno())


# JSON.


def kept(path: Path) -> Json:
    """The object in a file that is kept to save time; {} if there is no file, or it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def to_json(value: object, **options: Any) -> str:
    """JSON that every reader takes: numpy values as plain ones, NaN and infinity as null.

    Half a surrogate pair, as a file name that is no UTF-8 has, is written as its escape.
    """
    text = json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, **options)
    return text if is_unicode(text) else _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    return _HALF.search(text) is None


def _plain(value: object) -> object:
    import numpy as np

    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


# Arrays.


def write_tensors(path: Path, tensors: Mapping[str, "np.ndarray"], meta: Mapping[str, object]) -> None:
    """Writes arrays by name as safetensors, and `meta` as JSON in the header."""
    import numpy as np
    from safetensors.numpy import save

    plain = {name: np.asarray(t, order="C") for name, t in tensors.items()}
    with atomically(path) as file:
        file.write(save(plain, metadata={"specsparse": json.dumps(dict(meta))}))


def read_tensors(path: Path) -> tuple[dict[str, "np.ndarray"], dict[str, Any]]:
    """The arrays and the `meta` of `write_tensors`; UserError for no such file, or a damaged one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            meta = json.loads((file.metadata() or {}).get("specsparse", "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise _unread(path, error, "safetensors") from error
    return tensors, meta


def read_npz(path: Path) -> dict[str, "np.ndarray"]:
    """The arrays of a numpy archive, all of them read; UserError for no such file, a damaged one, or Python objects."""
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # a wrong checksum
        if broken is not None:
            raise ValueError(f"{broken} is damaged")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except _DAMAGED as error:
        raise _unread(path, error, ".npz") from error


def _unread(path: Path, error: Exception, form: str) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(f"no such file: {path}")
    return UserError(f"{path}: cannot be read as {form} ({error}): a whole copy is needed")


def save_state(path: Path, state: object, meta: Mapping[str, object]) -> None:
    """Writes a pytree of arrays by the order of its leaves."""
    import jax
    import numpy as np

    leaves = jax.tree.leaves(state)
    write_tensors(path, {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}, meta)


def load_state(path: Path, like: T) -> tuple[T, dict[str, Any]]:
    """The pytree of `save_state`, in the structure of `like`, and its `meta`; UserError for one of other shapes."""
    import jax
    import jax.numpy as jnp

    tensors, meta = read_tensors(path)
    leaves, structure = jax.tree.flatten(like)
    if {str(i): (leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)} != {
        name: (found.shape, found.dtype) for name, found in tensors.items()
    }:
        raise UserError(f"{path}: is a checkpoint of another training; remove it to begin again")
    return jax.tree.unflatten(structure, [jnp.asarray(tensors[str(i)]) for i in range(len(leaves))]), meta
