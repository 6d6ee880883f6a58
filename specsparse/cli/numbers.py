"""Whole numbers, names and lists of them, as arguments of a command."""

import argparse
from collections.abc import Callable, Collection

from specsparse.support.options import shown

_DIGITS = 18


def count(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if len(text) > _DIGITS:
        raise argparse.ArgumentTypeError(f"{shown(text)} is too large")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if count(text) == 0:
        raise argparse.ArgumentTypeError("0 is too small, 1 is the least")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 to 64, in order: `1..16`, `1,4,8`."""
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low, high = positive(first), positive(last if dots else first)
        if high > 64 or low > high:
            raise argparse.ArgumentTypeError(f"{part!r}: lengths from 1 to 64, the smaller first")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def names(text: str) -> tuple[str, ...]:
    """Words between commas, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}: names between commas")
    return found


def names_among(what: str, valid: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """`names`, each of which is one of `valid`; `what` says what they are names of."""

    def read(text: str) -> tuple[str, ...]:
        found = names(text)
        for name in found:
            if name not in valid:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}: there are {', '.join(valid)}")
        return found

    return read
