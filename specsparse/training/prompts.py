"""Prompts to train on: a small grammar, expanded at random, over the tasks of the built-in prompts."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

_GRAMMAR_FILE = Path(__file__).parents[1] / "data" / "training_prompts.json"
_SLOT = re.compile(r"\{([a-z_-]+|\d+\.\.\d+)\}")
_DEEPEST = 12


class TaskPrompt(NamedTuple):
    """A prompt and its task, one of the built-in prompts' tasks."""

    task: str
    text: str


@functools.cache
def grammar() -> Mapping[str, Sequence[str]]:
    """Rules by name; `tasks` maps each task to how often it comes. None of the built-in prompts is in them."""
    return json.loads(_GRAMMAR_FILE.read_text(encoding="utf-8"))


def prompt(index: int, *, seed: int = 0, rules: Mapping[str, Sequence[str]] | None = None) -> TaskPrompt:
    """Prompt number `index` of the endless list that belongs to `seed`.

    A rule's text holds slots: `{name}` is a text of that rule, `{2..9}` a whole number in that range. A rule that the
    rule `once` names gives one text throughout a prompt.
    """
    rules = grammar() if rules is None else rules
    rng = np.random.default_rng([seed, index])
    tasks = rules["tasks"]
    share = np.array([tasks[name] for name in tasks], np.float64)
    task = str(rng.choice(list(tasks), p=share / share.sum()))
    return TaskPrompt(task, _expand(rules, "{" + task + "}", rng, {}, 0))


def _expand(rules: Mapping[str, Sequence[str]], text: str, rng: np.random.Generator, fixed: dict, depth: int) -> str:
    if depth > _DEEPEST:
        raise ValueError(f"the grammar does not end: {text[:40]!r}")

    def fill(match: re.Match) -> str:
        slot = match[1]
        if ".." in slot:
            low, high = map(int, slot.split(".."))
            return str(rng.integers(low, high + 1))
        if slot in fixed:
            return fixed[slot]
        options = rules[slot]
        found = _expand(rules, options[int(rng.integers(len(options)))], rng, fixed, depth + 1)
        if slot in rules.get("once", ()):
            fixed[slot] = found
        return found

    return _SLOT.sub(fill, text)
