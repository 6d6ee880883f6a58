"""What is compared is timed beside each other, and the order turns round."""

import ast
import itertools
import time
from pathlib import Path

import specsparse
from specsparse.support.interleaved import alternating, interleaved, schedule, seconds


def test_order_turns_and_the_warm_up_is_not_kept():
    called, looks, done, count = [], [], [], itertools.count()

    def thing(name):
        called.append(name)
        return next(count)

    found = interleaved(
        {name: lambda name=name: thing(name) for name in "ab"}, repeats=3, before=lambda: looks.append(len(called)),
        done=lambda: done.append(len(called)),
    )  # fmt: skip
    assert called == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert found == {"a": [2, 5, 6], "b": [3, 4, 7]}
    assert looks == [2, 4, 6] and done == [1, 2, 3, 4, 5, 6, 7, 8]


def test_repeats_may_be_decided_on_the_way():
    asked = []
    found = list(schedule("ab", repeats=lambda n: asked.append(n) or n == 2, order=lambda names, repeat: iter(names)))
    assert found == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert asked == [1, 2]
    assert list(alternating("ab", 1)) == ["b", "a"]
    assert interleaved({"a": lambda: 1}, repeats=2, warm_up=0) == {"a": [1, 1]}


def test_seconds_are_of_the_call():
    assert 0.009 < seconds(lambda: time.sleep(0.01)) < 1


def test_no_other_loop_repeats_a_timing():
    root = Path(specsparse.__file__).parent
    for path in (*root.rglob("*.py"), *(root.parent / "experiments").glob("*.py")):
        if path.name != "interleaved.py":
            loops = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.For)]
            own = [ast.unparse(loop.iter) for loop in loops if "repeats" in ast.unparse(loop.iter)]
            own = [text for text in own if not text.startswith(("schedule(", "interleaved("))]
            assert not [text for text in own if "range" in text or "count" in text], f"{path}: {own}"
