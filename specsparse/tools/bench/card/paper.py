"""What the roofline says of the figures of `bench --device` before any is measured."""

from collections.abc import Sequence
from dataclasses import replace

from specsparse.data.devices import Device, sheets
from specsparse.kernels import TILE_ROWS
from specsparse.measure.costs.forecast import REACHED, Paper
from specsparse.measure.costs.outlines import ModelOutline
from specsparse.speculative import expected
from specsparse.support.files import Json
from specsparse.tools.bench.card.models import shape_of
from specsparse.tools.bench.card.speeds import ALPHA, GAMMA, PROMPT
from specsparse.tools.bench.card.stages import CardPlan

DEVICES = ("h200", "h100", "mi300x", "5090", "epyc12")
KINDS = ("BF16", "Q8_0", "Q4_0")


def figures(plan: CardPlan, devices: Sequence[str] = DEVICES) -> list[Json]:
    """A row for each device, shape and type: seconds of a step, tokens a second, v(8), v(16), and what drafts gain.

    Devices are taken to reach `forecast.REACHED` of their peaks. Speculation is that of the bench: drafts that cost
    nothing, of which each of `GAMMA` tokens is accepted with chance `ALPHA`, in steps padded to `TILE_ROWS` rows.
    """
    names = (plan.small, plan.large)
    return [row for device in devices for row in (_row(sheets()[device], n, k, plan) for n in names for k in KINDS)]


def _row(device: Device, name: str, kind: str, plan: CardPlan) -> Json:
    outline = ModelOutline.from_shape(name, replace(shape_of(name), weights=kind))  # type: ignore[arg-type]
    load = outline.traffic().requantised(kind)  # every matrix in that type, the output too
    paper = Paper(device, load, outline.kernels(), PROMPT + plan.tokens / 2)
    tokens = expected.expected_tokens(ALPHA, GAMMA)
    fits = device.memory is None or load.weight_bytes < device.memory
    return {
        "device": device.title, "model": name, "type": kind, "fits": fits, "step_s": paper.step_s,
        "tokens_per_second": 1 / paper.step_s, "v8": paper.v(8), "v16": paper.v(16),
        "speculation_over_one_row": tokens / paper.v(TILE_ROWS), "speculation_over_padded": tokens,
    }  # fmt: skip


def assumed() -> str:
    """What the figures take for granted, in a line."""
    memory, arithmetic = REACHED
    return f"predicted at {memory:.0%} of the bandwidth and {arithmetic:.0%} of the arithmetic on the sheets"
