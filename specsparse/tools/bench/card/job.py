"""All stages of `bench --device`, one after the other, and the report that they make."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import jax

from specsparse.errors import UserError
from specsparse.support.files import Json
from specsparse.support.options import nearest
from specsparse.tools.bench.card import equality, hybrid, paper, speeds
from specsparse.tools.bench.card.stages import CardPlan, Say, Stage, StageReport, run_apart, run_here

STAGES = {
    stage.name: stage
    for stage in (
        Stage("status", speeds.status, 60),
        Stage("equality", equality.equality, 90),
        Stage("small", speeds.decode_small, 75),
        Stage("bf16", speeds.decode_large_bf16, 75),
        Stage("q4_0", speeds.decode_large_q4, 75),
        Stage("speculation", speeds.speculation, 75),
        Stage("trees", speeds.trees, 60),
        Stage("hybrid", hybrid.hybrid, 75),
        Stage("int4", speeds.int4, 45),
        Stage("widths", speeds.widths, 90),
        Stage("q8_0", speeds.decode_large_q8, 75),
    )
}
"""By name, what counts most first: where time ends, the last ones are missing."""
TOTAL_S = 470.0
"""Of all stages; each also has its own limit."""
NO_DEVICE = 2
"""Exit code of a child that has no such device."""
_LEAST_S = 10.0


def check_device(plan: CardPlan) -> None:
    """UserError where jax does not run on the device of the plan."""
    here = jax.default_backend()
    if here != plan.device:
        raise UserError(
            f"no {plan.device} is here: jax {jax.__version__} runs on {here}. Beside a card, pip install 'jax[cuda13]' "
            "(or jax[tpu]) lets it be found; --device cpu --tiny --all tries the bench without one"
        )


def check_stages(names: Sequence[str]) -> None:
    """UserError for a stage that does not exist."""
    for name in names:
        if name not in STAGES:
            raise UserError(f"stage {name!r} does not exist{nearest(name, STAGES)}; there are {', '.join(STAGES)}")


def run(plan: CardPlan, names: Sequence[str], say: Say, *, apart: bool = True) -> Json:
    """Runs the stages and returns the report; nothing that one does ends the others.

    Args:
        plan: what each is told.
        names: of the stages, all where empty.
        say: takes lines as they come.
        apart: each in a process of its own, within `TOTAL_S` in all; else here, without limits.

    Raises:
        UserError: an unknown stage, or no such device.
    """
    check_stages(names)
    if not apart:
        check_device(plan)
    chosen = [STAGES[name] for name in names or STAGES]
    begun, done = time.monotonic(), list[StageReport]()
    for stage in chosen:
        left = TOTAL_S - (time.monotonic() - begun)
        if apart and left < _LEAST_S:
            done.append(StageReport(stage.name, 0.0, error="not begun: no time was left"))
            continue
        limit = min(stage.limit_s, left)
        heading = f"-- {stage.name} (at most {limit:.0f} s)"
        if done:
            say(heading)
        told = say if done else _headed(heading, say)  # where there is no such device, one line says so and no other
        done.append(_one(stage, plan, limit, told) if apart else run_here(stage, plan, told))
    return {
        "bench": "device",
        "plan": asdict(plan),
        "seconds": time.monotonic() - begun,
        "failed": [out.name for out in done if out.error],
        "stages": [out.to_dict() for out in done],
        "predicted": paper.figures(plan),
    }


def _one(stage: Stage, plan: CardPlan, limit_s: float, say: Say) -> StageReport:
    command = [sys.executable, "-u", "-m", f"{__package__}.child", stage.name, json.dumps(asdict(plan))]
    only = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"} if plan.device == "cpu" else {}
    out = run_apart(stage.name, limit_s, command, say, environment=only, unsaid=NO_DEVICE)
    if out.code == NO_DEVICE and out.error:
        raise UserError(out.error)
    return out


def _headed(heading: str, say: Say) -> Say:
    """`say`, with a heading before its first line."""
    waiting = [heading]

    def both(line: str) -> None:
        while waiting:
            say(waiting.pop())
        say(line)

    return both


def lines(found: Json) -> list[str]:
    """What is said at the end: what failed, and how long it took."""
    failed = [f"{out['name']}: {out['error']}" for out in found["stages"] if out["error"]]
    ended = f"{len(found['stages']) - len(failed)} of {len(found['stages'])} stages in {found['seconds']:.0f} s"
    return [ended, *(f"failed: {line}" for line in failed)]
