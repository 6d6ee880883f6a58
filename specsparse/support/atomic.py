"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from specsparse.errors import UserError


def need_folder(path: str | os.PathLike[str]) -> None:
    """For files that a user names: a mistyped folder is not made.

    Raises:
        UserError: the folder of `path` is not there.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise UserError(f"{path}: there is no folder {folder} to write it in")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty file that becomes `path` when the block ends without an error, and leaves nothing behind otherwise.

    Raises:
        UserError: it cannot be written: the folder, the disk.
    """
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
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """`replacing`, as an open binary file."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield file
