"""What differs between the configs of several runs, under the shortest names that are clear."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from specsparse.support.files import Json

NOTHING = "-"
"""For a run whose config does not have the setting."""

_IGNORED = frozenset({"name", "download"})
_CHOICES = {"model": "model.path", "data": "data.source"}
"""The setting of a group that its other settings come with; GROUP.name in the other groups."""
_WORDS = {"policy.gamma": "gamma", "sampling.temperature": "T"}


class Setting(NamedTuple):
    """One setting that differs.

    Attributes:
        key: dotted, as in the config.
        name: for a column or a label.
        values: a word a config, in their order; `NOTHING` where it has none.
    """

    key: str
    name: str
    values: tuple[str, ...]


def settings(configs: Sequence[Json]) -> list[Setting]:
    """The settings that differ between the configs.

    A choice brings the other settings of its group along: they are left out where the choice alone decides them.
    """
    flats = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for one in flats for key in one)
    differing = [k for k in keys if k not in _IGNORED and len({_same(one.get(k)) for one in flats}) > 1]
    kept = [k for k in differing if not _brought_along(k, differing, flats)]
    return [Setting(k, name(k, keys), _words([one.get(k) for one in flats])) for k in kept]


def name(key: str, keys: Iterable[str]) -> str:
    """The shortest name of a key that no other of the keys could be meant by."""
    if key in _WORDS:
        return _WORDS[key]
    group, _, last = key.rpartition(".")
    if group and key == _choice(group):
        return group
    groups = {other.partition(".")[0] for other in keys if "." in other}
    ends = Counter(other.rpartition(".")[2] for other in keys)
    return last if ends[last] <= 1 and last not in groups else key


def word(value: object) -> str:
    """A value as it is set, and of a path the last part."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    return str(value).rstrip("/").rsplit("/", 1)[-1]


def flat(values: Json, prefix: str = "") -> Iterator[tuple[str, object]]:
    """A config by dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _choice(group: str) -> str:
    return _CHOICES.get(group, f"{group}.name")


def _brought_along(key: str, differing: Sequence[str], flats: Sequence[Json]) -> bool:
    group, dot, _ = key.partition(".")
    choice = _choice(group)
    if not dot or key == choice or choice not in differing:
        return False
    decided = {(_same(one.get(choice)), _same(one.get(key))) for one in flats}
    return len(decided) == len({chosen for chosen, _ in decided})


def _same(value: object) -> str:
    """0 and 0.0 are one setting, 1 and true are two."""
    return repr(float(value)) if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def _words(values: Sequence[object]) -> tuple[str, ...]:
    """Short, but for values that would then look the same."""
    short = tuple(map(word, values))
    whole = tuple(NOTHING if v is None else str(v) for v in values)
    return short if len(set(short)) == len({_same(v) for v in values}) else whole
