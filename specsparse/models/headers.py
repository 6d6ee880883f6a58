"""The header of a GGUF file of the Hub without the file: its first megabytes, in a file with a hole for the weights."""

import hashlib
from pathlib import Path

from specsparse.engine.gguf.reader import open_one
from specsparse.errors import UserError
from specsparse.models import hub
from specsparse.support.files import atomically, cache_dir

FIRST, MOST = 1 << 20, 1 << 27
"""Bytes that are asked for at first, and at most; a header is its vocabulary, some megabytes."""


def download_header(text: str) -> Path:
    """A file of the whole size that holds the header alone; of a split model the first of such files.

    A file that is in the Hub's cache is taken as it is. Weights read as zeros: for `engine.gguf.reader.open_gguf` and
    for nothing that decodes.

    Args:
        text: `hf://owner/repo/file.gguf[@revision]`.

    Raises:
        UserError: as `hub.download`, or a file whose header is damaged.
    """
    wanted = hub.Reference.parse(text)
    if wanted.file is None or hub.offline():
        return hub.download(text)  # what is in the cache, or why there is nothing
    here = [next(hub.cached(part, repo=wanted.repo), None) for part in hub.parts(wanted.file)]
    if wanted.revision is None and here[0] is not None and all(here):
        return here[0]
    paths = [_header(wanted, part) for part in hub.parts(wanted.file)]
    return paths[0]


def is_header(path: Path) -> bool:
    """Whether a file is a header without weights, as `download_header` makes them."""
    return _folder() in path.parents


def _folder() -> Path:
    return cache_dir() / "headers"


def _header(wanted: hub.Reference, name: str) -> Path:
    """The header of one file, asked for in growing pieces until it is whole."""
    size, etag = hub.facts(wanted, name)
    folder = _folder() / hashlib.sha256(f"{wanted.repo} {wanted.file} {etag}".encode()).hexdigest()[:16]
    path = folder / Path(name).name
    if path.is_file():
        return path
    known, partial = b"", path.with_name(path.name + ".partial")
    while True:
        known += hub.part_of(wanted, name, len(known), min(max(2 * len(known), FIRST), size))
        with atomically(partial) as file:
            file.write(known)
            file.truncate(size)
        error = _damage(partial, len(known))
        if error is None:
            return partial.rename(path)
        if len(known) >= min(size, MOST):
            partial.unlink()
            raise UserError(f"{wanted}: {error}")


def _damage(path: Path, known: int) -> str | None:
    """What is wrong with a header of which so many bytes are known; None where it is whole."""
    try:
        f = open_one(path)
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    return None if f.layout is None or f.layout.data <= known else "its header is longer than what was asked for"
