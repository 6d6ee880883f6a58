"""Hydra's composition errors in one line each, with the nearest valid name."""

import difflib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from specsparse.errors import UserError
from specsparse.experiments.compose.parts import PARTS
from specsparse.models import catalogue
from specsparse.support.options import nearest

_SAID = {
    r"Ambiguous value for argument '([^']+)'": "{}: several values are a sweep, add -m; a list is written KEY=[a,b]",
    r"'hydra/(launcher|sweeper)/([a-z]+)\w*'": "{1} is not installed: {python} -m pip install hydra-{1}-{0}",
    r"Could not append to config\. An item is already at '([^']+)'": "{} is there already: write it without the +",
    r"Missing mandatory value: ([\w.]+)": "{}: a value is needed",
}
"""What Hydra says, and what to say instead of it."""

_MOST_LISTED = 24
"""Keys of one group that a line may list."""
_NEAR = 0.7
"""Least likeness of two keys of which one may be a slip for the other."""
_AS_NEAR = 0.15
"""A key less like than the best by more than this is not named beside it."""


def explain(error: Exception, conf: Path) -> UserError:
    """The `UserError` that says in one line what `error` (of Hydra or OmegaConf) means; `conf` is the config folder."""
    text = str(error)
    if error.__cause__ is not None and "\n" not in text:
        text = f"{text}: {error.__cause__}"
    groups = {d.name: sorted(f.stem for f in d.glob("*.yaml")) for d in sorted(conf.iterdir()) if d.is_dir()}
    override = getattr(error, "override", None)
    if override is not None:
        written = override.lstrip("+")  # which `shorthand` may have put before an option
        return UserError(f"cannot read {written!r}: write KEY=VALUE, and quote a value with special characters")
    for pattern, message in _SAID.items():
        match = re.search(pattern, text)
        if match:
            said = (group.lstrip("+") for group in match.groups())
            return UserError(message.format(*said, python=sys.executable))
    match = re.search(r"Could not find '(\w+)/([^']*)'", text)
    if match:
        group, choice = match.groups()
        names = [*groups.get(group, []), *(catalogue.names() if group == "model" else ())]
        return UserError(f"{group}={choice}: there is no such {group}{nearest(choice, names)}")
    match = re.search(r"Could not override '([^']+)'", text)
    if match:
        key = match.group(1).split("@")[0]
        return UserError(f"no key {key}{_near_key(key, groups, conf)}")
    match = re.search(r"You must specify '([^']+)'", text)
    if match:
        key = match.group(1)
        return UserError(f"{key}: choose one, such as {key}={next(iter(groups.get(key, ['NAME'])))}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return UserError("; ".join(lines[:2]) or type(error).__name__)


def _keys_of(conf: Path, group: str) -> set[str]:
    """Keys in the files of a group: options that only a drafter or a tracker knows about."""
    keys = re.findall(r"^(\w+):", _text(conf / group), re.MULTILINE)
    return {f"{group}.{key}" for key in keys if key != "defaults"}


def _keys_of_kinds(conf: Path) -> set[str]:
    """Keys in the files of experiments and of placements, such as `roofline.device`."""
    out, head = set(), ""
    for line in f"{_text(conf / 'experiment')}\n{_text(conf / 'placement')}".splitlines():
        found = re.match(r"(  )?(\w+):", line)
        if found and found[1]:
            out.add(f"{head}.{found[2]}")
        elif found:
            head = found[2]
            out.add(head)
    return {key for key in out if key.partition(".")[0] not in ("defaults", "hydra")}


def _text(folder: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.yaml")))


def _near_key(key: str, groups: dict[str, list[str]], conf: Path) -> str:
    """What to write instead of `key`: the nearest keys; else those of its group; else where all of them are listed."""
    from specsparse.experiments.compose.config import valid_keys  # numpy, which the page of usage needs not

    if key == "experiment":
        return "; write +experiment=NAME"
    head, dot, _ = key.partition(".")
    of_choices = (_keys_of(conf, group) for group in ([head] if dot else PARTS))
    keys = list(dict.fromkeys([*valid_keys(), *groups, *sorted(_keys_of_kinds(conf).union(*of_choices))]))
    if key in keys:
        return f" in this config; to add it write +{key}=VALUE"
    near = _near_keys(key, keys)
    if near:
        return f"; did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?"
    same = sorted(other for other in keys if other.startswith(f"{head}."))
    if dot and 0 < len(same) <= _MOST_LISTED:
        return f"; valid: {', '.join(same)}"
    named = sorted({*groups, *(other.partition(".")[0] for other in keys if "." in other)})
    return f" and none like it; groups: {', '.join(named)}; all keys of a config: +experiment=NAME --help"


def _near_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Dotted keys like `key`, the nearest first and of equals the first given; at most three.

    Likeness is that of the whole keys, of their last parts, or of the last part and a word of the other one's (`limit`
    and `data.limit_per_task`). If `key` has a group, keys of a group of such a name go first, else keys without one.
    """
    likeness = {other: _likeness(key, other) for other in keys}
    best = max(likeness.values(), default=0.0)
    near = [other for other, like in likeness.items() if like and like >= best - _AS_NEAR]
    return sorted(near, key=lambda other: -likeness[other])[:3]


def _likeness(key: str, other: str) -> float:
    """About 1 if they are the same or nearly, and 1 more for the same group; 0 if they are not alike."""

    def ratio(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    (head, _, name), (group, _, option) = key.rpartition("."), other.rpartition(".")
    like = max(ratio(name, part) for part in (option, *option.split("_")))
    if head:
        return like + ratio(head, group) if like >= _NEAR else 0.0
    like = max(like, ratio(key, other))
    return like + (0.0 if group else _AS_NEAR) if like >= _NEAR else 0.0
