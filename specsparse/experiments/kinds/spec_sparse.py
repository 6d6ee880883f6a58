"""`kind: spec_sparse`: speculation and sparsity, each alone and both together, and what a verification pass reads.

    plain dense | plain sparse | spec dense | spec sparse        the same prompts in turn, one set of weights

Bytes predict each cell: a pass reads what is dense, and of the FFNs the union of the neurons that its rows keep.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.table import Table
from rich.text import Text

from specsparse.errors import UserError, refuse
from specsparse.experiments import configured, decoding, sparse_model
from specsparse.experiments.decoding import Passes
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.kinds.sparsity import SparsitySpec, judged_text
from specsparse.experiments.settings import DecodingSettings
from specsparse.measure import conditions, speedups
from specsparse.measure.conditions import UNKNOWN, Conditions
from specsparse.measure.speedups import Repeats, Speedup
from specsparse.powerinfer import zero_skip
from specsparse.powerinfer.fewer import UnionPoint, UnionWatch, bytes_read, gated, kept_masks, union_of_text
from specsparse.powerinfer.sparse_ffn import runs_densely
from specsparse.predictors.evaluate import ModelQuality, matrices, quality_in_chunks
from specsparse.predictors.rules import UnionCap
from specsparse.report import display, plots
from specsparse.report.plots import FAINT, Figure, Row
from specsparse.report.record import Pass, differing_tokens, draws_z
from specsparse.runtime import metrics
from specsparse.runtime.metrics import Counters
from specsparse.speculative.verifiers import same_text
from specsparse.support import tables, terminal

BATCHES = (2, 4)
"""Sequences verified together whose union is looked at."""
DEFINITIONS = {
    "speedup": "seconds per token of plain dense decoding / those of the cell, same prompts, decoded in turn",
    "by_bytes": "tokens per pass x bytes of a dense pass / bytes of the cell's; drafting is not counted",
    "union": "neurons that some row of a pass keeps / all, mean over passes and layers",
    "guess": "1 - (1 - kept)^rows, layer by layer: what independent rows would need",
    "product": "speed-up of plain sparse x speed-up of spec dense",
}
PLAIN_DENSE, PLAIN_SPARSE = "plain dense", "plain sparse"
SPEC_DENSE, SPEC_SPARSE, SPEC_CAPPED = "spec dense", "spec sparse", "spec sparse, capped"
TEXT, PASSES = "text", "passes"


@dataclass(frozen=True, kw_only=True)
class SpecSparseSettings(DecodingSettings):
    sparsity: SparsitySpec = field(default_factory=SparsitySpec)


@dataclass(frozen=True)
class SparseCell:
    """One way to decode, all prompts together; the speed-up is over plain dense decoding."""

    name: str
    counters: Counters
    seconds_per_token: float
    speedup: Speedup
    by_bytes: float
    read: float  # share of the FFNs' neurons that a pass reads
    # tokens that are not those of plain decoding with the same FFN, or of plain dense decoding if the sparse model
    # has the dense one's bits
    differing: int
    draws_z: float | None = None  # as in `metrics.DEFINITIONS`

    @property
    def tokens_per_pass(self) -> float:
        return self.counters.num_emitted_tokens / self.counters.num_rounds


@dataclass(frozen=True)
class Joined:
    """All cells, and what their passes read."""

    cells: dict[str, SparseCell]  # the four cells, and the capped one if `ffn.union_cap` asks for it
    # unions of consecutive tokens of a text, by size of the pass, and of drafts in a batch
    text: tuple[UnionPoint, ...]
    seen: tuple[UnionPoint, ...]  # unions of the passes that the sparse cell made, by size
    quality: dict[str, ModelQuality]  # of the sparse model against the dense one, by cell
    promised: bool  # whether the verifier promises plain decoding's tokens
    # whether the sparse model has the dense one's bits; then its cells are compared with plain dense decoding
    exact: bool
    labels: dict[str, str]  # the promise in words of each cell in `quality`
    conditions: Conditions = UNKNOWN
    repeats: Repeats | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Doubts of texts and times; tokens per pass bound what speculation adds to decoding one model."""
        alone = {SPEC_DENSE: PLAIN_DENSE, SPEC_SPARSE: PLAIN_SPARSE}
        of_texts = metrics.draws_doubts((name, cell.draws_z) for name, cell in self.cells.items())
        return of_texts + conditions.doubts(self.conditions, {
            name: conditions.impossible(
                self.cells[name].speedup.ratio_of_totals / self.cells[plain].speedup.ratio_of_totals,
                self.cells[name].tokens_per_pass,
            )
            for name, plain in alone.items()
        })  # fmt: skip

    @property
    def combined(self) -> dict[str, float]:
        """`product`, the speed-up of both if neither knew of the other; `over_better`, both over the better alone."""
        alone = [self.cells[name].speedup.ratio_of_totals for name in (PLAIN_SPARSE, SPEC_DENSE)]
        both = self.cells[SPEC_SPARSE].speedup.ratio_of_totals
        return {"product": alone[0] * alone[1], "over_better": both / max(alone)}

    @property
    def as_promised(self) -> bool:
        """Speculation wrote plain decoding's tokens on both models, and an exact sparse model the dense one's; a
        capped union promises nothing."""
        same = (*((SPEC_DENSE, SPEC_SPARSE) if self.promised else ()), *((PLAIN_SPARSE,) if self.exact else ()))
        return not any(self.cells[c].differing for c in same)


class FfnReading(NamedTuple):
    """Share of the FFNs' neurons, and bytes, that a pass reads, mean over the passes of a cell."""

    share: float
    size: float

    @classmethod
    def from_points(
        cls, points: Sequence[UnionPoint], own: tuple[int, int], dense: int, *, whole: Callable[[int, float], bool]
    ) -> "FfnReading":
        """`own` as by `fewer.bytes_read`; passes of so many rows that keep such a share of the neurons each read all
        `dense` bytes if `whole` says so."""
        passes, share, size = sum(p.passes for p in points), 0.0, 0.0
        for p in points:
            every = whole(p.rows, p.kept)
            share += p.passes * (1.0 if every else p.union)
            size += p.passes * (dense if every else own[0] + p.union * own[1])
        return cls(share / passes, size / passes) if passes else cls(0.0, 0.0)


class SpecSparse(Kind[SpecSparseSettings]):
    """Speculation and sparsity, each alone and both together, and what a verification pass reads."""

    takes_lengths = True

    def check(self, cfg: SpecSparseSettings) -> None:
        spec = cfg.spec
        decoding.check(cfg, [spec], union_cap=True)
        refuse({
            "kind=spec_sparse compares a sparse FFN with the dense one: give ffn=predicted and a predictor":
                cfg.ffn.name in (None, "dense"),
            "kind=spec_sparse compares speculation with plain decoding: give drafter=prompt_lookup":
                spec.drafter is None,
        })  # fmt: skip

    def run(self, cfg: SpecSparseSettings, ctx: RunContext) -> RunResult:
        """Decodes every cell in turn, watches what the passes read, judges the quality."""
        dense = ctx.load(cfg.model, ffn="dense")
        sparse = sparse_model.sparse_of(cfg, ctx, dense)
        method = configured.filled(cfg, dense, ctx.counting).spec.arguments()
        models = {PLAIN_DENSE: dense, PLAIN_SPARSE: sparse.model, SPEC_DENSE: dense, SPEC_SPARSE: sparse.model}
        predictors = {PLAIN_SPARSE: sparse.predictor, SPEC_SPARSE: sparse.predictor}
        if cfg.ffn.union_cap is not None:
            predictors[SPEC_CAPPED] = UnionCap(sparse.predictor, cfg.ffn.union_cap)
            models[SPEC_CAPPED] = gated(dense, predictors[SPEC_CAPPED], sparse.weights)
        methods = {name: {} if name in (PLAIN_DENSE, PLAIN_SPARSE) else method for name in models}
        jobs = decoding.prepared_prompts(cfg, ctx.engine, dense)
        # The first decoding of each side compiles and is not timed.
        loop = Passes(replace(cfg, warmup=True), ctx, dense, methods, other=models)
        passes = list(loop.timed(jobs))
        lossy, seen = [name for name in models if name in (SPEC_SPARSE, SPEC_CAPPED)], {}
        for name in lossy:  # what the verification passes of one decoding keep, by the host loop
            watch = UnionWatch(models[name].config.d_ff)
            with terminal.busy(ctx.console, "watching what the passes read"):
                counted = lambda r, watch=watch: watch(1 + int(np.asarray(r.draft.count)[0]), r.stats)  # noqa: E731
                loop.generate(jobs[0], name, watch=counted)
            seen[name] = watch.points()
        windows, rows = judged_text(cfg.data, cfg.sparsity, dense), method["drafter"].max_nodes + 1
        masks_WLnF = kept_masks(sparse.model, sparse.predictor, windows)
        count, _, length, _ = masks_WLnF.shape
        sizes = [(n, 1) for n in sorted({1, 2, 4, 8, rows}) if n <= length]
        sizes += [(rows, batch) for batch in BATCHES if batch <= count and rows <= length]
        text = tuple(union_of_text(masks_WLnF, tokens=n, batch=batch) for n, batch in sizes)
        exact = {name for name, model in models.items() if zero_skip.skips(model.params)}
        ffn_bytes = sum(m.nbytes for layer in dense.params.layers for m in matrices(layer))
        points, read = {PLAIN_SPARSE: text[:1], **seen}, {}
        for name, model in models.items():
            read[name] = FfnReading(1.0, ffn_bytes)
            if name in points:
                own = bytes_read(model, predictors[name])
                # Of zeros, those of one row alone are skipped.
                whole = (lambda rows, kept: rows > 1) if name in exact else partial(
                    runs_densely, model.params.layers[0].sparse
                )  # fmt: skip
                read[name] = FfnReading.from_points(points[name], own, ffn_bytes, whole=whole)
        found = Joined(
            cells=_cells(passes, read, dense.footprint.packed, as_dense=exact | {PLAIN_DENSE, SPEC_DENSE}),
            text=text,
            seen=tuple(seen[SPEC_SPARSE]),
            quality={name: quality_in_chunks(dense, models[name], windows, rows=rows) for name in lossy},
            promised=same_text(method["verifier"].name),
            exact=PLAIN_SPARSE in exact,
            labels={name: sparse_model.label(models[name]).get("ffn_label", "") for name in lossy},
            conditions=loop.conditions(),
            repeats=loop.repeats,
        )
        model = sparse.model
        title = f"{cfg.name}: {Path(dense.path).name}, {cfg.drafter.name} x {cfg.verifier.name}, ffn {model.rule}"
        cells = {name: {**asdict(c), "speedup": c.speedup.to_dict()} for name, c in found.cells.items()}
        taken = display.condition_lines(found.conditions, found.repeats, found.warnings)
        return RunResult(
            {**asdict(found), "cells": cells, "warnings": list(found.warnings),
             **found.combined, "repeats": found.repeats and found.repeats.to_dict(), **sparse_model.label(model)},
            found,
            shown=[Text(title, style="bold"), *parts(found), *taken],
            figures=[unions(found, title), cells_figure(found, title)],
            definitions={**DEFINITIONS, **conditions.DEFINITIONS},
            as_promised=found.as_promised,
            objective=found.cells[SPEC_SPARSE].speedup.ratio_of_totals,
        )  # fmt: skip


def _cells(
    passes: list[Pass], read: Mapping[str, FfnReading], whole: int, *, as_dense: set[str]
) -> dict[str, SparseCell]:
    """The cells by name, from the timed passes, what a pass of each reads of the FFNs, the bytes of the dense model,
    and the names of the cells whose tokens should be plain dense decoding's.
    """
    by_side = {name: [p for p in passes if p.side == name and p.token_ids] for name in read}
    if not by_side[PLAIN_DENSE]:
        raise UserError("no token was written: the prompts fill the model's context")
    plain = {(p.prompt_id, p.repeat): p.decode_s / len(p.token_ids) for p in by_side[PLAIN_DENSE]}
    rest, out = whole - read[PLAIN_DENSE].size, {}
    for name, some in by_side.items():
        seconds = [p.decode_s / len(p.token_ids) for p in some]
        counters = sum((p.counters for p in some), Counters())
        expected = by_side[PLAIN_DENSE if name in as_dense else PLAIN_SPARSE]
        wanted = {p.prompt_id: p.token_ids for p in reversed(expected)}
        dense_s = [plain[p.prompt_id, p.repeat] for p in some]
        out[name] = SparseCell(
            name=name,
            counters=counters,
            seconds_per_token=float(np.mean(seconds)),
            speedup=speedups.speedup(dense_s, seconds, prompts=[p.prompt_id for p in some]),
            by_bytes=counters.num_emitted_tokens / counters.num_rounds * whole / (rest + read[name].size),
            read=read[name].share,
            differing=sum(differing_tokens(p.token_ids, wanted[p.prompt_id]) for p in some),
            draws_z=draws_z(some),
        )
    return out


def parts(found: Joined) -> Iterator[Table | str]:
    """The tables and the lines between them; acc.: mean acceptance length; read: share of the neurons by a pass."""
    note = metrics.lengths_note(per_pass="tok/pass", length="acc.")
    titles = ("", "tok/s", "speed-up", "95 % interval", "by bytes", "tok/pass", "acc.", "read", "differing")
    table = tables.new(*titles, close=True, note=note)
    for c in found.cells.values():
        n, faster = c.counters, c.speedup
        length = f"{1 + n.num_accepted_tokens / n.num_drafts:.2f}" if n.num_drafts else "-"
        table.add_row(
            c.name, f"{1 / c.seconds_per_token:.1f}", f"{faster.ratio_of_totals:.2f}",
            faster.interval.ends(), f"{c.by_bytes:.2f}",
            f"{c.tokens_per_pass:.2f}", length, f"{c.read:.1%}", str(c.differing),
        )  # fmt: skip
    yield table
    yield "both together: {over_better:.2f} times as fast as the better of the two alone".format(**found.combined)
    yield "product of the two speed-ups alone: {product:.2f}".format(**found.combined)
    for name, q in found.quality.items():
        same = f"most likely token the same {q.same_top:.1%} of the time"
        ppl = f"perplexity {q.perplexity:.2f} for {q.perplexity_dense:.2f}"
        yield f"{name}: KL {q.kl:.4f} nats, {ppl}, {same}; {found.labels[name]}"
    titles = ("sequences", "rows of a pass", "a row keeps", "union in text", "guess", "passes", "union", "guess")
    table = tables.new(*titles, left=(), close=True)
    text = {(p.batch, p.rows): p for p in found.text}  # consecutive tokens, as if every draft were right
    seen = {(1, p.rows): p for p in found.seen}
    for key in sorted({*text, *seen}):
        one, other = text.get(key), seen.get(key)
        cells = [*map(str, key), f"{(one or seen[key]).kept:.1%}"]
        cells += [f"{one.union:.1%}", f"{one.guess:.1%}"] if one else ["", ""]
        cells += [str(other.passes), f"{other.union:.1%}", f"{other.guess:.1%}"] if other else ["", "", ""]
        table.add_row(*cells)
    yield table


def unions(found: Joined, title: str) -> Figure:
    """Neurons read against the rows of a pass, in the text and in the passes of the run."""
    both = ((TEXT, found.text), (PASSES, found.seen))
    rows = tuple({"of": kind, **asdict(p)} for kind, points in both for p in points)

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        axes, text = canvas.subplots(), [row for row in rows if row["of"] == TEXT]
        for batch, _, own in plots.series(text, "batch"):
            label = "consecutive tokens of a text" + (f", {batch} sequences" if batch > 1 else "")
            axes.plot([row["rows"] for row in own], [row["union"] for row in own], marker="o", label=label)
        chain = [row for row in text if row["batch"] == 1]
        guess = [row["guess"] for row in chain]
        axes.plot([row["rows"] for row in chain], guess, "--", color=FAINT, label="1 - (1 - s)^n")
        seen = [row for row in rows if row["of"] == PASSES]
        axes.plot([row["rows"] for row in seen], [row["union"] for row in seen], "s", label="passes of this run")
        axes.set(title=title, xlabel="rows of a pass", ylabel="neurons read", ylim=(0, 1.02))
        axes.legend()

    caption = "Share of the neurons that some row of a pass keeps; 1 - (1 - s)^n is what independent rows would need."
    return Figure("union", title, caption, rows, draw, (6.0, 4.0))


def cells_figure(found: Joined, title: str) -> Figure:
    rows = tuple(
        {"cell": c.name, "by_bytes": c.by_bytes, "measured": c.speedup.ratio_of_totals} for c in found.cells.values()
    )

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        axes, place = canvas.subplots(), range(len(rows))
        axes.bar([p - 0.2 for p in place], [row["by_bytes"] for row in rows], 0.4, label="by bytes")
        axes.bar([p + 0.2 for p in place], [row["measured"] for row in rows], 0.4, label="measured")
        axes.axhline(1.0, color=FAINT, linewidth=0.8)
        axes.set_xticks(place, [row["cell"].replace(", ", "\n") for row in rows])
        axes.set(title=title, ylabel="speed-up over plain dense decoding")
        axes.legend()

    return Figure("cells", title, "Over plain dense decoding.", rows, draw, (6.0, 4.0))
