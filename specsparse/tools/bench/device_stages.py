"""The stages of `bench device`, each in a process of its own: a crash, a hang or a card that gives up loses one stage.

`python -m specsparse.tools.bench.device_stages STAGE PLAN` is such a process. It prints a row of JSON for each
figure as soon as it has it; rows that it printed count whatever comes after.
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
from functools import partial
from typing import NamedTuple

import jax
from rich.console import Console

from specsparse.errors import UserError, pip_install
from specsparse.support.files import Json, to_json
from specsparse.support.options import nearest
from specsparse.tools.bench import device_figures as figures
from specsparse.tools.bench.device_figures import CardPlan

ROW = "row "
"""A child's line with a row begins with this; its other lines are passed on."""
TOTAL_S = 470.0
"""Of all stages; each also has its own limit."""
NO_DEVICE = 2
"""Exit code of a child that has no such device."""
_LEAST_S = 10.0
Say = Callable[[str], None]


class Stage(NamedTuple):
    """Its figures, one after the other, within `limit_s` seconds."""

    name: str
    rows: Callable[[CardPlan], Iterator[Json]]
    limit_s: float


STAGES = {
    stage.name: stage
    for stage in (
        Stage("status", figures.status, 60),
        Stage("equality", figures.equality, 90),
        Stage("small", figures.decode, 75),
        Stage("bf16", partial(figures.decode, kind="BF16"), 75),
        Stage("q4_0", partial(figures.decode, kind="Q4_0"), 75),
        Stage("speculation", figures.speculation, 75),
        Stage("trees", figures.trees, 60),
        Stage("hybrid", figures.hybrid, 75),
        Stage("int4", figures.int4, 45),
        Stage("widths", figures.widths, 90),
        Stage("q8_0", partial(figures.decode, kind="Q8_0"), 75),
    )
}
"""By name, the most important first: if time ends, the last ones are missing."""


@dataclass
class StageReport:
    """The rows of a stage, in `error` one line if it did not end as it should, and the exit code of its process."""

    name: str
    limit_s: float
    seconds: float = 0.0
    rows: list[Json] = field(default_factory=list)
    error: str | None = None
    code: int | None = None


@dataclass(frozen=True)
class DeviceBench:
    """All stages, or some; each in a process of its own, within `TOTAL_S` in all, but `tiny` ones in this."""

    device: str
    stages: tuple[str, ...] = ()  # names; () for every stage
    tiny: bool = False
    layers: int | None = None
    repeats: int | None = None  # None is as many as usual
    backend: str | None = None

    def plan(self) -> CardPlan:
        backend = self.backend or ("xla" if self.device == "cpu" else None)
        repeats = self.repeats or (1 if self.tiny else 3)
        return CardPlan(self.device, self.tiny, self.layers, 8 if self.tiny else 64, repeats, backend)

    def check(self) -> None:
        for name in self.stages:
            if name not in STAGES:
                raise UserError(f"stage {name!r} does not exist{nearest(name, STAGES)}; there are {', '.join(STAGES)}")
        if self.tiny:
            check_device(self.plan())

    def run(self, out: Console) -> Json:
        """The report, whatever happens in a stage; UserError if there is no such device."""
        say = partial(out.print, soft_wrap=True, highlight=False, markup=False)  # a name in brackets is no style
        return run(self.plan(), self.stages, say, apart=not self.tiny)

    def parts(self, report: Json) -> Iterator[str]:
        failed = [f"{stage['name']}: {stage['error']}" for stage in report["stages"] if stage["error"]]
        yield f"{len(report['stages']) - len(failed)} of {len(report['stages'])} stages in {report['seconds']:.0f} s"
        yield from (f"failed: {line}" for line in failed)


def check_device(plan: CardPlan) -> None:
    """UserError if jax does not run on the device of the plan."""
    here = jax.default_backend()
    if here != plan.device:
        raise UserError(
            f"no {plan.device} is here: jax {jax.__version__} runs on {here}. Beside a card, "
            f"{pip_install('jax[cuda13]')} (or jax[tpu]) lets it be found; "
            "bench device cpu --tiny --all tries the bench without one"
        )


def run(plan: CardPlan, names: Sequence[str], say: Say, *, apart: bool = True) -> Json:
    """The report of some stages, all if `names` is empty; `say` takes lines as they come."""
    begun, done = time.monotonic(), list[StageReport]()
    for stage in [STAGES[name] for name in names or STAGES]:
        left = TOTAL_S - (time.monotonic() - begun)
        if apart and left < _LEAST_S:
            done.append(StageReport(stage.name, 0.0, error="not begun: no time was left"))
            continue
        limit = min(stage.limit_s, left)
        heading = [f"-- {stage.name} (at most {limit:.0f} s)"]

        def told(line: str, heading: list[str] = heading) -> None:
            while heading:
                say(heading.pop())
            say(line)

        if done:  # before the first figure: if there is no such device, one line says so and no other
            say(heading.pop())
        if not apart:
            done.append(run_here(stage, plan, lambda row: told(shown(row))))
            if done[-1].error:
                told(f"failed: {done[-1].error}")
            continue
        command = [sys.executable, "-u", "-m", f"{__package__}.device_stages", stage.name, json.dumps(asdict(plan))]
        only = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} if plan.device == "cpu" else {}
        done.append(run_apart(stage.name, limit, command, told, environment=only, unsaid=NO_DEVICE))
        if done[-1].code == NO_DEVICE and done[-1].error:
            raise UserError(done[-1].error)
    return {
        "bench": "device",
        "plan": asdict(plan),
        "seconds": time.monotonic() - begun,
        "failed": [stage.name for stage in done if stage.error],
        "stages": [asdict(stage) for stage in done],
        "predicted": figures.predictions(plan),
    }


def run_here(stage: Stage, plan: CardPlan, show: Callable[[Json], None]) -> StageReport:
    """The stage in this process, which ends it at no time; `show` takes each row."""
    out, begun = StageReport(stage.name, stage.limit_s), time.monotonic()
    try:
        for row in stage.rows(plan):
            out.rows.append(row)
            show(row)
    except Exception as error:  # whatever it is, the other stages go on
        traceback.print_exc()
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        out.error = first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"[:300]
    out.seconds = time.monotonic() - begun
    return out


def run_apart(
    name: str, limit_s: float, command: Sequence[str], say: Say, *, environment: Mapping[str, str] | None = None,
    unsaid: int | None = None,
) -> StageReport:  # fmt: skip
    """A stage in a process of its own, which is ended after `limit_s` seconds; `command` prints rows as `main` does.

    `say` takes a line for each row as it comes, and for a failure but one with the exit code `unsaid`, which the caller
    tells.
    """
    out, begun, last = StageReport(name, limit_s), time.monotonic(), list[str]()
    child = subprocess.Popen(
        list(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env={**os.environ, **(environment or {})},
    )  # fmt: skip

    def read_rows() -> None:
        for line in child.stdout or ():
            if line.startswith(ROW):
                out.rows.append(json.loads(line[len(ROW) :]))
                say(shown(out.rows[-1]))

    def read_last() -> None:
        for line in child.stderr or ():
            if line.strip():
                last[:] = [line.strip()[:300]]

    readers = [threading.Thread(target=read, daemon=True) for read in (read_rows, read_last)]
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


def shown(row: Json) -> str:
    """A row as a line: "what: key=value, ..."."""
    values = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items() if key != "what"}
    return f"{row.get('what', '')}: {', '.join(f'{key}={value}' for key, value in values.items())}"


def main(stage: Stage, plan: CardPlan) -> int:
    """A child: rows on the standard output, one line of what went wrong last on the other.

    The exit code is 0, 1 if the stage failed, `NO_DEVICE` if the device is not here.
    """
    try:
        check_device(plan)
    except UserError as error:
        print(error, file=sys.stderr)
        return NO_DEVICE
    out = run_here(stage, plan, lambda row: print(ROW + to_json(row), flush=True))
    if out.error:
        print(out.error, file=sys.stderr, flush=True)
    return int(bool(out.error))


if __name__ == "__main__":
    sys.exit(main(STAGES[sys.argv[1]], CardPlan(**json.loads(sys.argv[2]))))
