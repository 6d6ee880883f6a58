"""Timing several things beside each other: in turn, so that drift of the machine hits all alike."""

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Found = TypeVar("Found")
Order = Callable[[Sequence[Name], int], Iterator[Name]]
"""order(names, repeat) -> every name once."""


def seconds(call: Callable[[], object]) -> float:
    """Seconds of a call that returns when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def turned(names: Sequence[Name], repeat: int) -> Iterator[Name]:
    """In their order in even repeats and backwards in odd ones."""
    return iter(names) if repeat % 2 == 0 else reversed(names)


def turns(
    names: Sequence[Name],
    *,
    repeats: int | Callable[[int], bool],
    warm_up: int = 0,
    order: Order = turned,
    before: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, Name]]:
    """Whose turn it is: (repeat, name), every name once in each repeat.

    Args:
        names: of what is timed; neighbours are timed beside each other.
        repeats: how many, at least one, or enough(done), which is asked after each repeat.
        warm_up: repeats before those; they have numbers below 0.
        order: of the names in each repeat.
        before: called before each repeat from 0 on: looks at the machine.
    """
    enough = (lambda done: done >= repeats) if isinstance(repeats, int) else repeats
    for repeat in itertools.count(-warm_up):
        if repeat >= 0:
            before()
        for name in order(names, repeat):
            yield repeat, name
        if repeat >= 0 and enough(repeat + 1):
            return


def in_turn(
    things: Mapping[Name, Callable[[], Found]],
    *,
    repeats: int,
    warm_up: int = 1,
    order: Order = turned,
    before: Callable[[], object] = lambda: None,
    done: Callable[[], object] = lambda: None,
) -> dict[Name, list[Found]]:
    """Calls every thing once in each repeat and returns what each call found, by name and repeat.

    Args:
        things: by name; each returns its seconds, or whatever else it measured.
        repeats: that are kept, at least one.
        warm_up: repeats before those, which compile and touch memory and are not kept.
        order: of the names in each repeat.
        before: called before each repeat that is kept: looks at the machine.
        done: called after each call, those of the warm-up too.
    """
    kept: dict[Name, list[Found]] = {name: [] for name in things}
    for repeat, name in turns(list(things), repeats=repeats, warm_up=warm_up, order=order, before=before):
        found = things[name]()
        if repeat >= 0:
            kept[name].append(found)
        done()
    return kept
