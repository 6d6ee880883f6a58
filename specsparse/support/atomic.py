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


def need_place(path: str | os.PathLike[str], *sources: str | os.PathLike[str] | None, picture: bool = False) -> None:
    """For one file to write, before the work that fills it.

    Args:
        path: of the file; replaced where it is there.
        sources: files that the work reads, and folders whose files it reads; None and names of neither are passed over.
        picture: whether a figure is written, which is a PNG and nothing else.

    Raises:
        UserError: `path` is a folder, one of the sources or in one of them, or its folder is not there or lets nothing
            be written, or the name of a picture does not end in .png.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file to write")
    if picture and path.suffix.lower() != ".png":
        raise UserError(f"{path}: figures are written as PNG; name a file that ends in .png")
    need_folder(path)
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path}: cannot be written: the folder {path.parent} is not writable here")
    for source in map(Path, filter(None, sources)):
        if path.is_file() and any(read.is_file() and path.samefile(read) for read in (source, source / path.name)):
            raise UserError(f"{path}: is a file that is read; give another file to write")


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


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Adds a line to a file; where the disk is full, none of it, and the lines before it stay; no file of no lines.

    Raises:
        UserError: it cannot be written.
    """
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
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; make room, or write it elsewhere"
        ) from None
