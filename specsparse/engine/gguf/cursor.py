"""A position in the header of a GGUF file that cannot leave it."""

import mmap
import struct
from pathlib import Path
from typing import NoReturn

from specsparse.errors import UserError

_U64 = struct.Struct("<Q")


class Cursor:
    """A bounds-checked position in the header; every error names the file and what was being read."""

    def __init__(self, buffer: mmap.mmap, path: Path):
        self.buffer, self.path = buffer, path
        self.size, self.at = len(buffer), 0

    def fail(self, what: str) -> NoReturn:
        """Ends the reading with one line about the file."""
        raise UserError(f"{self.path}: {what}")

    def take(self, n: int, what: str) -> int:
        """Moves past n bytes and returns where they start."""
        if n > self.size - self.at:
            self.fail(f"truncated: {what} needs {n} bytes at offset {self.at}, the file has {self.size}")
        start, self.at = self.at, self.at + n
        return start

    def scalar(self, code: str, what: str) -> int | float | bool:
        """The next little-endian value of a `struct` code."""
        form = "<" + code
        return struct.unpack_from(form, self.buffer, self.take(struct.calcsize(form), what))[0]

    def count(self, smallest: int, what: str) -> int:
        """A u64 count of entries of at least `smallest` bytes, refused where they could not fit in what is left."""
        n = self.scalar("Q", what)
        self.check_count(n, smallest, what)
        return n

    def check_count(self, n: int, smallest: int, what: str) -> None:
        """Refuses a count of entries of at least `smallest` bytes that could not fit in what is left."""
        if n > (self.size - self.at) // smallest:
            self.fail(f"{what} is {n}, more than the file's {self.size} bytes can hold")

    def string(self, what: str) -> str:
        """A u64 length and as many bytes of UTF-8."""
        n = self.count(1, f"the length of {what}")
        start = self.take(n, what)
        try:
            return str(self.buffer[start : start + n], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} at offset {start} is not valid UTF-8")

    def name(self, what: str) -> str:
        """The name of an entry. An empty one is what padding reads as when a count is too high."""
        what = f"the name of {what}"
        return self.string(what) or self.fail(f"{what} is empty")

    def strings(self, n: int, what: str) -> list[str]:
        """n strings; one loop without calls, because vocabularies are long."""
        out: list[str] = []
        append, buffer, size, at, read = out.append, self.buffer, self.size, self.at, _U64.unpack_from
        for i in range(n):
            start = at + 8
            end = start + read(buffer, at)[0] if start <= size else size + 1
            if end > size:
                self.fail(f"truncated: string {i} of {what} at offset {at} runs past the file's {size} bytes")
            try:
                append(buffer[start:end].decode())
            except UnicodeDecodeError:
                self.fail(f"string {i} of {what} at offset {start} is not valid UTF-8")
            at = end
        self.at = at
        return out
