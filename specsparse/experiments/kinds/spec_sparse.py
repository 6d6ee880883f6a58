"""`kind: spec_sparse`: speculation and sparsity, each alone and both together, and what a verification pass reads.

    plain dense | plain sparse | spec dense | spec sparse        the same prompts in turn, one set of weights

Bytes predict each cell: a pass reads what is dense, and of the FFNs the union of the neurons that its rows keep.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from specsparse.errors import UserError
from specsparse.experiments import decoding, sparse_model, trackers
from specsparse.experiments.config import RunConfig, sampling_params
from specsparse.experiments.decoding import Engine, Job, Passes
from specsparse.experiments.kinds import spec_sparse_report
from specsparse.experiments.kinds.sparsity import judged_text
from specsparse.experiments.sparse_model import Sparse
from specsparse.measure import conditions, speedup
from specsparse.measure.conditions import UNKNOWN, Conditions
from specsparse.measure.repeats import Repeats
from specsparse.measure.speedup import Speedup
from specsparse.models import catalogue
from specsparse.powerinfer.ffn import union, zero_skip
from specsparse.powerinfer.ffn.chunked import quality_in_chunks
from specsparse.powerinfer.ffn.gated import bytes_read, gated
from specsparse.powerinfer.ffn.union import UnionPoint
from specsparse.predictors.fit.price import matrices
from specsparse.predictors.fit.quality import ModelQuality
from specsparse.predictors.union_cap import UnionCap
from specsparse.report import display
from specsparse.report.record import RECORD_FILE, SAME_TEXT_VERIFIERS, Pass
from specsparse.runtime import manifest
from specsparse.runtime.metrics import Counters
from specsparse.support import terminal

PLAIN_DENSE, PLAIN_SPARSE = "plain dense", "plain sparse"
SPEC_DENSE, SPEC_SPARSE, SPEC_CAPPED = "spec dense", "spec sparse", "spec sparse, capped"
BATCHES = (2, 4)
"""Sequences verified together whose union is looked at."""
DEFINITIONS = {
    "speedup": "seconds per token of plain dense decoding / those of the cell, same prompts, decoded in turn",
    "by_bytes": "tokens per pass x bytes of a dense pass / bytes of the cell's; drafting is not counted",
    "union": "neurons that some row of a pass keeps / all, mean over passes and layers",
    "guess": "1 - (1 - kept)^rows, layer by layer: what independent rows would need",
    "product": "speed-up of plain sparse x speed-up of spec dense",
}


@dataclass(frozen=True)
class Cell:
    """One way to decode, all prompts together.

    Attributes:
        name: of the cell.
        counters: sums over the timed passes.
        seconds_per_token: decoding only.
        speedup: over plain dense decoding.
        by_bytes: the speed-up that bytes would give.
        read: share of the FFNs' neurons that a pass reads.
        differing: tokens that are not those of plain decoding with the same FFN, or of plain dense decoding where the
            sparse model has the dense one's bits.
    """

    name: str
    counters: Counters
    seconds_per_token: float
    speedup: Speedup
    by_bytes: float
    read: float
    differing: int

    @property
    def tokens_per_pass(self) -> float:
        """Of the target."""
        return self.counters.num_emitted_tokens / self.counters.num_rounds


@dataclass(frozen=True)
class Joined:
    """What was found.

    Attributes:
        cells: the four cells, and the capped one if `ffn.union_cap` asks for it.
        text: unions of consecutive tokens of a text, by size of the pass, and of drafts in a batch.
        seen: unions of the passes that the sparse cell made, by size.
        quality: of the sparse model against the dense one, by cell.
        promised: whether the verifier promises plain decoding's tokens.
        exact: whether the sparse model has the dense one's bits; then its cells are compared with plain dense decoding.
        labels: the promise in words of each cell in `quality`.
        conditions: what the cells were taken at, in turn.
        repeats: how often.
    """

    cells: dict[str, Cell]
    text: tuple[UnionPoint, ...]
    seen: tuple[UnionPoint, ...]
    quality: dict[str, ModelQuality]
    promised: bool
    exact: bool
    labels: dict[str, str]
    conditions: Conditions = UNKNOWN
    repeats: Repeats | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the times doubtful; tokens per pass bound what speculation adds to plain decoding of one model."""
        alone = {SPEC_DENSE: PLAIN_DENSE, SPEC_SPARSE: PLAIN_SPARSE}
        return conditions.doubts(self.conditions, {
            name: conditions.impossible(
                self.cells[name].speedup.ratio_of_totals / self.cells[plain].speedup.ratio_of_totals,
                self.cells[name].tokens_per_pass,
            )
            for name, plain in alone.items()
        })  # fmt: skip

    @property
    def product(self) -> float:
        """What both would give if neither knew of the other."""
        return self.cells[PLAIN_SPARSE].speedup.ratio_of_totals * self.cells[SPEC_DENSE].speedup.ratio_of_totals

    @property
    def over_better(self) -> float:
        """Both together over the better of the two alone."""
        both = self.cells[SPEC_SPARSE].speedup.ratio_of_totals
        return both / max(self.cells[c].speedup.ratio_of_totals for c in (PLAIN_SPARSE, SPEC_DENSE))

    @property
    def as_promised(self) -> bool:
        """Speculation wrote plain decoding's tokens on both models, and an exact sparse model the dense one's; where
        the union is capped nothing is promised."""
        same = (*((SPEC_DENSE, SPEC_SPARSE) if self.promised else ()), *((PLAIN_SPARSE,) if self.exact else ()))
        return not any(self.cells[c].differing for c in same)

    @property
    def objective(self) -> float:
        """The speed-up of both together."""
        return self.cells[SPEC_SPARSE].speedup.ratio_of_totals


def check(cfg: RunConfig) -> None:
    """What can be found wrong before anything is loaded.

    Raises:
        UserError: no sparse FFN, no drafter, or what `decoding.check` finds.
    """
    decoding.check(cfg)
    if cfg.ffn.name in (None, "dense"):
        raise UserError("kind=spec_sparse compares a sparse FFN with the dense one: give ffn=predicted and a predictor")
    if not decoding.method(cfg):
        raise UserError("kind=spec_sparse compares speculation with plain decoding: give drafter=prompt_lookup")


def run(cfg: RunConfig, directory: Path, *, engine: Engine, console: Console) -> Joined:
    """Decodes every cell in turn, watches what the passes read, judges the quality; writes tables, figure, record.

    Raises:
        UserError: a mistake in the config, the model file or the prompts.
    """
    check(cfg)
    dense = sparse_model.read(cfg, engine, console, ffn="dense")
    sparse = sparse_model.sparse_of(cfg, engine, dense, console)
    method = decoding.method(cfg, decoding.what_is_measured(cfg, dense, console))
    sides = _sides(cfg, dense, sparse, method)
    jobs = [Job(p, decoding.conversation_ids(cfg, engine, dense, p)) for p in decoding.prompts_of(cfg)]
    loop = _passes(cfg, engine, sides, console)
    passes = list(loop.timed(jobs))
    lossy = [name for name in sides if name in (SPEC_SPARSE, SPEC_CAPPED)]
    seen = {name: _watched(cfg, engine, *sides[name], jobs[0], console) for name in lossy}
    windows, rows = judged_text(cfg, dense), method["drafter"].max_nodes + 1
    text = _of_text(union.masks(sparse.model, sparse.predictor, windows), rows)
    exact = {name for name, (model, _) in sides.items() if zero_skip.skips(model.params)}
    read = {
        name: Reading.of(
            points, bytes_read(sides[name][0], _predictor(cfg, name, sparse)), _ffn_bytes(dense), wide=name in exact
        )
        for name, points in {PLAIN_SPARSE: text[:1], **seen}.items()
    }
    found = Joined(
        cells=_cells(passes, list(sides), read, dense, exact),
        text=text,
        seen=tuple(seen[SPEC_SPARSE]),
        quality={name: quality_in_chunks(dense, sides[name][0], windows, rows=rows) for name in lossy},
        promised=method["verifier"].name in SAME_TEXT_VERIFIERS,
        exact=PLAIN_SPARSE in exact,
        labels={name: sparse_model.label(sides[name][0]).get("ffn_label", "") for name in lossy},
        conditions=loop.conditions(),
        repeats=loop.repeats,
    )
    _write(cfg, directory, dense, sparse.model, found, console)
    return found


def _of_text(masks_WLnF: np.ndarray, rows: int) -> tuple[UnionPoint, ...]:
    """Passes of one sequence with 1 to 8 tokens and with those of a draft, and of drafts in a batch."""
    windows, _, length, _ = masks_WLnF.shape
    alone = [union.of_text(masks_WLnF, tokens=n) for n in sorted({1, 2, 4, 8, rows}) if n <= length]
    together = [union.of_text(masks_WLnF, tokens=rows, batch=b) for b in BATCHES if b <= windows and rows <= length]
    return (*alone, *together)


Sides = dict[str, tuple[Any, dict[str, Any]]]
"""Model and keyword arguments of generate by the name of the cell."""


def _sides(cfg: RunConfig, dense: Any, sparse: Sparse, method: dict[str, Any]) -> Sides:
    sides: Sides = {PLAIN_DENSE: (dense, {}), PLAIN_SPARSE: (sparse.model, {})}
    sides |= {SPEC_DENSE: (dense, method), SPEC_SPARSE: (sparse.model, method)}
    if cfg.ffn.union_cap is not None:
        capped = gated(dense, _predictor(cfg, SPEC_CAPPED, sparse), sparse.weights)
        sides[SPEC_CAPPED] = (capped, method)
    return sides


def _predictor(cfg: RunConfig, name: str, sparse: Sparse) -> Any:
    return UnionCap(sparse.predictor, cfg.ffn.union_cap) if name == SPEC_CAPPED else sparse.predictor


def _passes(cfg: RunConfig, engine: Engine, sides: Sides, out: Console) -> Passes:
    """Every side in turn; the first decoding of each compiles and is not timed."""
    methods, of = ({name: side[i] for name, side in sides.items()} for i in (1, 0))
    return Passes(replace(cfg, warmup=True), engine, of[PLAIN_DENSE], methods, out, other_models=of)


def _watched(cfg: RunConfig, engine: Engine, model: Any, method: dict, job: Job, out: Console) -> list[UnionPoint]:
    """What the verification passes of one decoding kept, stepped from the host."""
    watch = union.UnionWatch(model.config.d_ff)
    options = {"sampling": sampling_params(cfg), "seed": cfg.seed, "max_tokens": cfg.max_tokens}
    with terminal.busy(out, "watching what the passes read"):
        engine.generate(
            model, job.ids, **options, **method, watch=lambda r: watch(1 + int(np.asarray(r.draft.count)[0]), r.stats)
        )
    return watch.points()


class Reading(NamedTuple):
    """Of the FFNs, mean over the passes of a cell.

    Attributes:
        share: of the neurons.
        size: bytes.
    """

    share: float
    size: float

    @staticmethod
    def of(points: Sequence[UnionPoint], own: tuple[int, int], dense: int, *, wide: bool) -> "Reading":
        """`own`: what `gated.bytes_read` says; `wide`: passes of several rows run densely and read `dense` bytes."""
        passes, share, size = sum(p.passes for p in points), 0.0, 0.0
        for p in points:
            whole = wide and p.rows > 1
            share += p.passes * (1.0 if whole else p.union)
            size += p.passes * (dense if whole else own[0] + p.union * own[1])
        return Reading(share / passes, size / passes) if passes else Reading(0.0, 0.0)


def _ffn_bytes(dense: Any) -> int:
    return sum(m.nbytes for layer in dense.params.layers for m in matrices(layer))


def _cells(
    passes: list[Pass], names: list[str], read: dict[str, Reading], dense: Any, exact: set[str]
) -> dict[str, Cell]:
    """`read`: of the sparse cells; `exact`: the cells whose tokens plain dense decoding should have."""
    by_side = {name: [p for p in passes if p.side == name] for name in names}
    plain = {(p.prompt_id, p.repeat): p.decode_s / len(p.token_ids) for p in by_side[PLAIN_DENSE]}
    whole = dense.footprint.packed
    ffns = Reading(1.0, _ffn_bytes(dense))
    out = {}
    for name, some in by_side.items():
        seconds = [p.decode_s / len(p.token_ids) for p in some]
        counters = sum((p.counters for p in some), Counters())
        own = read.get(name, ffns)
        model = PLAIN_SPARSE if name in read and name not in exact else PLAIN_DENSE
        out[name] = Cell(
            name=name,
            counters=counters,
            seconds_per_token=float(np.mean(seconds)),
            speedup=speedup.speedup(
                [plain[p.prompt_id, p.repeat] for p in some], seconds, prompts=[p.prompt_id for p in some]
            ),
            by_bytes=counters.num_emitted_tokens / counters.num_rounds * whole / (whole - ffns.size + own.size),
            read=own.share,
            differing=_differing(some, by_side[model]),
        )
    return out


def _differing(passes: list[Pass], plain: list[Pass]) -> int:
    """Tokens of the passes that are not those of the first plain pass of the prompt."""
    wanted = {p.prompt_id: p.token_ids for p in reversed(plain)}
    pairs = [(p.token_ids, wanted[p.prompt_id]) for p in passes]
    return sum(sum(a != b for a, b in zip(x, y, strict=False)) + abs(len(x) - len(y)) for x, y in pairs)


def _write(cfg: RunConfig, directory: Path, dense: Any, sparse: Any, found: Joined, out: Console) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    made = manifest.build(cfg.composed, Path(catalogue.resolve(cfg.model.path)))
    what = f"{Path(dense.path).name}, {cfg.drafter.name} x {cfg.verifier.name}, ffn {sparse.rule}"
    spec_sparse_report.write_csv(directory / spec_sparse_report.CSV_FILE, found)
    spec_sparse_report.write_figure(directory / spec_sparse_report.FIGURE_FILE, found, title=f"{cfg.name}: {what}")
    cells = {name: {**asdict(c), "speedup": c.speedup.to_dict()} for name, c in found.cells.items()}
    summary = {**asdict(found), "cells": cells, "product": found.product, "over_better": found.over_better,
               "repeats": found.repeats and found.repeats.to_dict(), **sparse_model.label(sparse)}  # fmt: skip
    trackers.make(cfg.tracker.name, cfg.tracker.options, directory).finish({
        "name": cfg.name, "kind": cfg.kind, "summary": summary,
        "definitions": {**DEFINITIONS, **conditions.DEFINITIONS}, "manifest": made, "config": made["config"],
    })  # fmt: skip
    out.print(Text(f"{cfg.name}: {what}", style="bold"))
    for part in spec_sparse_report.parts(found):
        out.print(part)
    for line in display.condition_lines(found.conditions, found.repeats, found.warnings):
        out.print(line)
    files = f"{directory / RECORD_FILE}, {spec_sparse_report.CSV_FILE}, {spec_sparse_report.FIGURE_FILE}"
    out.print(Text(f"record: {files}", style="dim"))
