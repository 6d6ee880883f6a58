"""Stages of a run on a card, each in a process of its own: a crash, a hang or a card that gives up loses one stage.

A child prints a row of JSON for each figure as soon as it has it; what it has said counts whatever comes after.
"""

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from specsparse.errors import UserError
from specsparse.support.files import Json, to_json

ROW = "row "
"""What a child's line with a row begins with; its other lines are passed on."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class CardPlan:
    """What every stage is told.

    Attributes:
        device: "gpu", "tpu" or "cpu".
        tiny: shapes for the tests of the bench itself.
        layers: of the large shape; None is all.
        tokens: to decode.
        repeats: timings of each figure.
        backend: of the kernels; None is the default of the device.
    """

    device: str = "gpu"
    tiny: bool = False
    layers: int | None = None
    tokens: int = 64
    repeats: int = 3
    backend: str | None = None

    @property
    def small(self) -> str:
        """The smaller of the two shapes."""
        return "tiny" if self.tiny else "smollm2-135m"

    @property
    def large(self) -> str:
        """The larger one."""
        return "tiny" if self.tiny else "llama-2-7b"


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: as it is asked for.
        rows: its figures, one after the other.
        limit_s: seconds it may take.
    """

    name: str
    rows: Callable[[CardPlan], Iterator[Json]]
    limit_s: float


@dataclass
class StageReport:
    """What came of a stage: its rows, and in `error` one line where it did not end as it should.

    `code` is that of the process that it had of its own.
    """

    name: str
    limit_s: float
    seconds: float = 0.0
    rows: list[Json] = field(default_factory=list)
    error: str | None = None
    code: int | None = None

    def to_dict(self) -> Json:
        """As plain values."""
        return asdict(self)


def run_here(stage: Stage, plan: CardPlan, say: Say) -> StageReport:
    """The stage in this process; its time limit is not kept."""
    out, begun = StageReport(stage.name, stage.limit_s), time.monotonic()
    try:
        for row in stage.rows(plan):
            out.rows.append(row)
            say(shown(row))
    except Exception as error:  # whatever it is, the other stages go on
        out.error = _line(error)
        say(f"failed: {out.error}")
    out.seconds = time.monotonic() - begun
    return out


def run_apart(
    name: str, limit_s: float, command: Sequence[str], say: Say, *, environment: Mapping[str, str] | None = None,
    unsaid: int | None = None,
) -> StageReport:  # fmt: skip
    """A stage in a process of its own, which is ended after `limit_s` seconds.

    Args:
        name: of the stage.
        limit_s: seconds it may take.
        command: prints rows as `print_rows` does.
        say: takes a line for each row as it comes, and what went wrong.
        environment: variables beside ours.
        unsaid: the exit code of which the caller tells.
    """
    out, begun = StageReport(name, limit_s), time.monotonic()
    child = subprocess.Popen(
        list(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    last: list[str] = []
    readers = [
        threading.Thread(target=_read_rows, args=(child.stdout, out.rows, say), daemon=True),
        threading.Thread(target=_read_last, args=(child.stderr, last), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        out.code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        out.error = f"took longer than its {limit_s:.0f} s; {len(out.rows)} figures were measured"
    for reader in readers:
        reader.join(5.0)
    if out.code:
        ending = f"signal {-out.code}" if out.code < 0 else f"exit code {out.code}"
        out.error = last[-1] if last and out.code > 0 else ": ".join([ending, *last])
    out.seconds = time.monotonic() - begun
    if out.error and (unsaid is None or out.code != unsaid):
        say(f"failed: {out.error}")
    return out


def _read_rows(lines: Iterator[str], rows: list[Json], say: Say) -> None:
    for line in lines:
        if line.startswith(ROW):
            rows.append(json.loads(line[len(ROW) :]))
            say(shown(rows[-1]))


def _read_last(lines: Iterator[str], last: list[str]) -> None:
    for line in lines:
        if line.strip():
            last[:] = [line.strip()[:300]]


def print_rows(stage: Stage, plan: CardPlan) -> int:
    """What a child does: rows on the standard output, one line of what went wrong last on the other; the exit code."""
    try:
        for row in stage.rows(plan):
            print(ROW + to_json(row), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(_line(error), file=sys.stderr, flush=True)
        return 1
    return 0


def _line(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"[:300]


def shown(row: Json) -> str:
    """A row as a line: "what: key=value, ..."."""
    rest = ", ".join(f"{key}={_short(value)}" for key, value in row.items() if key != "what")
    return f"{row.get('what', '')}: {rest}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
