"""Timing several things beside each other: interleaved, so that drift of the machine hits all alike."""

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Order = Callable[[Sequence[Name], int], Iterator[Name]]
"""order(names, repeat) -> every name once."""


def seconds(call: Callable[[], object]) -> float:
    """Seconds of a call that returns when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternating(names: Sequence[Name], repeat: int) -> Iterator[Name]:
    """The sides in their order in even repeats and backwards in odd ones."""
    return iter(names) if repeat % 2 == 0 else reversed(names)


def schedule(
    names: Sequence[Name], *, repeats: int | Callable[[int], bool], warm_up: int = 0, order: Order = alternating,
    before: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, Name]]:  # fmt: skip
    """The order of timings: (repeat, name), every name once in each repeat.

    Args:
        names: of what is timed; neighbours are timed beside each other.
        repeats: how many, at least one, or enough(done), which is asked after each repeat.
        warm_up: repeats before those; they have numbers below 0.
        order: of the names in each repeat.
        before: called before each repeat from 0 on, to measure the machine.
    """
    enough = (lambda done: done >= repeats) if isinstance(repeats, int) else repeats
    for repeat in itertools.count(-warm_up):
        if repeat >= 0:
            before()
        for name in order(names, repeat):
            yield repeat, name
        if repeat >= 0 and enough(repeat + 1):
            return


def interleaved(
    calls: Mapping[Name, Callable[[], Result]], *, repeats: int, warm_up: int = 1, order: Order = alternating,
    before: Callable[[], object] = lambda: None, done: Callable[[], object] = lambda: None,
) -> dict[Name, list[Result]]:  # fmt: skip
    """Calls each once in every repeat of a `schedule` and returns the results by name, one a repeat.

    A call returns its seconds, or whatever else it measured. Results of the warm-up, which compiles and touches memory,
    are not kept. `done` is called after each call, those of the warm-up too.
    """
    kept: dict[Name, list[Result]] = {name: [] for name in calls}
    for repeat, name in schedule(list(calls), repeats=repeats, warm_up=warm_up, order=order, before=before):
        result = calls[name]()
        if repeat >= 0:
            kept[name].append(result)
        done()
    return kept
