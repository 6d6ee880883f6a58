"""What the files of a run hold where readers look: the types of a record.json and of the rows of prompts.jsonl."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from specsparse.errors import UserError
from specsparse.support import options
from specsparse.support.files import Json

_Group = dict | None
_Others = Annotated[dict, options.Rest()]


@dataclass(frozen=True)
class _Policy:
    gamma: float | str | None = None
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Sampling:
    temperature: float | str | None = None
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Config:
    policy: _Policy = _Policy()
    sampling: _Sampling = _Sampling()
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Git:
    commit: str | None = None
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Manifest:
    cpu: _Group = None
    git: _Git = _Git()
    kernels: _Group = None
    model: _Group = None
    packages: _Group = None
    command: tuple[Any, ...] | None = None
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Conditions:
    read_bandwidth: float | None = None
    read_deviation: float | None = None
    plain_tokens_per_second: float | None = None
    plain_deviation: float | None = None
    other_load: float | None = None
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Times:
    draft: float | None = None
    verify: float | None = None
    sample: float | None = None
    commit: float | None = None
    host: float | None = None
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Counters:
    times: _Times = _Times()
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Side:
    counters: _Counters = _Counters()
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class _Task:
    speculative: _Side = _Side()
    others: _Others = field(default_factory=dict)


def _tasks(found: object) -> object:
    """The groups of a run by task; other kinds hold what they like."""
    for name, task in found.items() if isinstance(found, dict) else ():
        if not isinstance(task, dict):
            raise TypeError
        options.read(_Task, task, group=f"tasks.{name}")
    return found


@dataclass(frozen=True)
class _Summary:
    conditions: _Conditions = _Conditions()
    identity: _Group = None
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """What a record.json holds where it holds it; the rest may be anything."""

    summary: _Summary
    config: _Config = _Config()
    manifest: _Manifest = _Manifest()
    method: _Group = None
    tasks: Annotated[object | None, options.Read(_tasks, "a group of values by task")] = None
    others: _Others = field(default_factory=dict)


@dataclass(frozen=True)
class PassRow:
    """What a line of prompts.jsonl holds that is a timed pass."""

    prompt_id: str
    task: str | None
    side: str
    repeat: int
    counters: dict[str, Any]
    decode_s: float | None
    others: _Others = field(default_factory=dict)


def check(kind: type, found: Json, where: object) -> None:
    """Refuses what a run does not write, where it would be read.

    Raises:
        UserError: the file and the first value that is none.
    """
    try:
        options.read(kind, found, group="")
    except UserError as error:
        raise UserError(f"{where}: not as a run writes it: {error}") from None
