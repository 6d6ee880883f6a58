"""`kind: experts_union`: which experts the rows of a forward wake together, which of their neurons stay idle in all of
those rows, and the time of n rows that the bytes of both predict, beside the measured one.

    chain     consecutive tokens of a text: a draft that is all right
    random    tokens of any texts at any places
    others    the passes that verified drafts of a method, right or wrong
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from matplotlib.figure import Figure as Canvas
from rich.table import Table
from rich.text import Text

from specsparse.engine.config import woken
from specsparse.engine.experts import ChosenExperts
from specsparse.engine.model import Model
from specsparse.errors import UserError, refuse
from specsparse.experiments import configured, decoding
from specsparse.experiments.kind import Kind, RunContext, RunResult, header_of
from specsparse.experiments.kinds import train_experts
from specsparse.experiments.settings import DecodingSettings, choice_from_file
from specsparse.measure import machine
from specsparse.measure.costs.roofline import ModelOutline
from specsparse.measure.costs.unions import Union, of_text, watching
from specsparse.measure.trials import Ours
from specsparse.predictors.collect import windows
from specsparse.report import display, plots
from specsparse.report.plots import FAINT, Figure, Row
from specsparse.runtime import metrics
from specsparse.runtime.loops import RoundView
from specsparse.runtime.method import MethodSpec
from specsparse.runtime.metrics import Counters
from specsparse.support import tables
from specsparse.support.interleaved import interleaved
from specsparse.support.options import Count, Range, Size
from specsparse.support.registry import Choice

CHAIN, RANDOM = "chain", "random"
DEFINITIONS = {
    "experts": "U(n): experts of a layer that some of n rows choose, mean over the sets of rows",
    "by_chance": "E (1 - (1 - k/E)^n), if rows choose independently and all experts are alike",
    "by_overlap": "if a row has the part `overlap` of its experts from the row before, as two rows of a text have, and "
    "the others by chance",
    "idle": "z(n): share of the neurons of woken experts that are idle in all rows that chose their expert",
    "rows_an_expert": "n k / U(n): rows that a woken expert computes",
    "v_by_chance": "bytes of n rows / bytes of one, all weights of the experts of `by_chance`",
    "v_woken": "the same with all weights of the experts of `experts`, of chains",
    "v_active": "the same without up and down of the neurons of `idle`",
    "v_measured": "seconds of a forward of n rows of a text / of one, interleaved; it reads all neurons",
    "dense_idle": "z(n) of a dense ReLU model on the same texts, whose one FFN all rows choose",
}


@dataclass(frozen=True)
class UnionSpec:
    """The rows that are looked at; methods are watched for drafts of the most rows less one."""

    rows: tuple[Count, ...] = (1, 2, 4, 8)
    window: Annotated[int, Range(16)] = 128  # tokens of a piece of text
    judged: Count = 16  # pieces
    random: Count = 400  # sets of rows of any texts
    drafters: tuple[str, ...] = ("prompt_lookup", "layer_skip")
    trees: tuple[str, ...] = ("static",)  # drafted by layer_skip
    dense: str | None = "smollm2-135m-relu"  # a dense ReLU model to compare with; None: none
    repeats: Size = 15  # of the timing; 0: none


@dataclass(frozen=True, kw_only=True)
class UnionSettings(DecodingSettings):
    union: UnionSpec = field(default_factory=UnionSpec)


class ExpertsUnion(Kind[UnionSettings]):
    """Experts that rows wake together, and the neurons of those that stay idle."""

    takes_ffn = False
    takes_lengths = True

    def check(self, cfg: UnionSettings) -> None:
        made = train_experts.FOLDER / train_experts.FILE
        if Path(cfg.model.path) == made and not made.exists():
            raise UserError(f"{made} is not here: python -m specsparse.run +experiment=train_experts makes it")
        spec, config = cfg.union, header_of(cfg.model)[1]
        rows, most = [*spec.rows], min(spec.window, config.context_length)
        refuse({
            f"kind=experts_union is for models with experts, and {cfg.model.path} has none": not config.n_experts,
            f"union.rows={rows}: 1 and then more, rising": rows != sorted({1, *rows}) or len(rows) < 2,
            f"union.rows={rows}: at most {most}, the tokens of a piece of text": max(rows, default=0) > most,
        })
        if spec.dense is not None:
            other = header_of(replace(cfg.model, path=spec.dense))[1]
            refuse({
                f"union.dense={spec.dense} is no dense model with a gate": other.n_experts or not other.gated,
                f"union.rows={rows}: {spec.dense} reads {other.context_length} tokens": rows[-1] > other.context_length,
            })
        decoding.check(cfg, methods(cfg).values())

    def run(self, cfg: UnionSettings, ctx: RunContext) -> RunResult:
        spec, model = cfg.union, ctx.load(cfg.model)
        watched = watching(model)
        curves = of_texts(cfg, ctx, watched)
        counters: dict[str, Counters] = {}
        for name, method in methods(cfg).items():
            curves[name], counters[name] = of_passes(cfg, ctx, watched, name, method)
        outline = ModelOutline.from_file(cfg.model.path, Path(model.path))
        dense = None
        if spec.dense is not None:
            other = ctx.load(replace(cfg.model, path=spec.dense), ffn="dense")
            dense = of_texts(cfg, ctx, watching(other))[CHAIN]
        meter = machine.Meter()
        measured = timed(cfg, ctx, model, meter) if spec.repeats else {}
        found = list(summary_rows(cfg, outline, curves[CHAIN], dense, measured))
        layers = [
            {"rows_of": name, "n": n, "layer": layer, "experts": float(u), "idle": float(z), "sets": union.sets}
            for name, unions in curves.items() for n, union in unions.items()
            for layer, (u, z) in enumerate(zip(union.experts_L, union.idle_L, strict=True))
        ]  # fmt: skip
        accepted = {name: metrics.rates(c) for name, c in counters.items()}
        title = f"{cfg.name}: {Path(model.path).name}, {model.config.n_chosen} of {model.config.n_experts} experts"
        taken = meter.conditions(None, []) if measured else None
        return RunResult(
            {"rows": found, "layers": layers, "methods": accepted, "dense": spec.dense,
             "conditions": taken and taken.to_dict()},
            curves,
            shown=[Text(title, style="bold"), *parts(model, curves, found, accepted, spec.dense),
                   *display.condition_lines(taken)],
            figures=[figure(curves, found, title), plots.Rows("layers", layers)],
            definitions=DEFINITIONS,
        )  # fmt: skip


Unions = Mapping[int, Union]
"""Of sets of n rows, by n."""


def methods(cfg: UnionSettings) -> dict[str, MethodSpec]:
    """The methods whose passes are watched, by the names of their curves."""
    fixed, chosen = Choice("fixed", {"gamma": max(cfg.union.rows) - 1}), partial(configured.drafter_choice, cfg)
    found = {name: MethodSpec(chosen(name), None, fixed, None, cfg.params) for name in cfg.union.drafters}
    for name in cfg.union.trees:
        tree = choice_from_file("tree", name)
        found[f"{name} tree"] = MethodSpec(chosen("layer_skip"), None, fixed, tree, cfg.params)
    return found


def of_texts(cfg: UnionSettings, ctx: RunContext, model: Model) -> dict[str, Unions]:
    """Chains and random rows of the texts, each of which is read once; `model` is made by `watching`."""
    spec = cfg.union
    texts = [model.tokenizer.encode(p.text, add_special=True) for p in cfg.data.prompts()]
    pieces_Wn = windows(texts, min(spec.window, model.config.context_length))[: spec.judged]
    with ctx.counting("reading text", len(pieces_Wn)) as step:
        each = []
        for ids in pieces_Wn.tolist():
            each.append(of_text(model, ids))
            step()
    seen = joined(each)
    places_Wn = np.arange(pieces_Wn.size).reshape(pieces_Wn.shape)
    rng, length = np.random.default_rng(cfg.seed), pieces_Wn.shape[1]
    chains = {n: places_Wn[:, : length // n * n].reshape(-1, n) for n in spec.rows}
    drawn = {n: np.stack([rng.choice(places_Wn.size, n, replace=False) for _ in range(spec.random)]) for n in spec.rows}
    return {
        name: {n: Union.from_rows(seen, sets) for n, sets in some.items()}
        for name, some in ((CHAIN, chains), (RANDOM, drawn))
    }


def of_passes(
    cfg: UnionSettings, ctx: RunContext, model: Model, name: str, method: MethodSpec
) -> tuple[Unions, Counters]:
    """The first n rows of every pass that has n and verified a draft, while the prompts are decoded."""
    seen: list[ChosenExperts] = []

    def watch(view: RoundView) -> None:
        rows = 1 + int(np.asarray(view.draft.count)[0])
        if rows > 1:
            seen.append(jax.tree.map(lambda a: np.asarray(a)[:, :rows], view.stats))

    jobs, counters = decoding.prepared_prompts(cfg, ctx.engine, model), Counters()
    with ctx.counting(f"decoding with {name}", len(jobs)) as step:
        for job in jobs:
            how = {**decoding.draws(cfg, job.prompt), **method.arguments(), "watch": watch}
            counters += ctx.engine.generate(model, job.ids, **how).stats.counters
            step()
    lengths = [each.experts.shape[1] for each in seen]
    starts = np.cumsum([0, *lengths])[:-1]
    found = {}
    for n in cfg.union.rows:
        sets = [range(start, start + n) for start, rows in zip(starts, lengths, strict=True) if rows >= n]
        if sets:
            found[n] = Union.from_rows(joined(seen), sets)
    return found, counters


def joined(each: Sequence[ChosenExperts]) -> ChosenExperts:
    """Rows after one another."""
    return jax.tree.map(lambda *arrays: np.concatenate([np.asarray(a) for a in arrays], axis=1), *each)


def timed(cfg: UnionSettings, ctx: RunContext, model: Model, meter: machine.Meter) -> dict[int, float]:
    """v(n), the median over the repeats, of forwards of n rows behind a text's first ones."""
    texts = [model.tokenizer.encode(p.text, add_special=True) for p in cfg.data.prompts()]
    (ids, *_), most = windows(texts, min(cfg.union.window, model.config.context_length)), max(cfg.union.rows)
    side = Ours(model, depth=len(ids) - most, room=most, forwards=1, ids=ids)
    works = {n: partial(side.verify, n) for n in cfg.union.rows}
    with ctx.counting("timing", len(works) * (cfg.union.repeats + 1)) as step:
        taken = interleaved(works, repeats=cfg.union.repeats, before=meter.sample, done=step)
    return {n: float(np.median(np.divide(taken[n], taken[1]))) for n in works}


def summary_rows(
    cfg: UnionSettings, model: ModelOutline, chain: Unions, dense: Unions | None,
    measured: Mapping[int, float],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """By n, means over the layers of chains; see `DEFINITIONS`."""
    E, k, traffic, one = model.config.n_experts, model.config.n_chosen, model.traffic(), chain[1]
    overlap = 2 - float(chain[2].experts_L.mean()) / k if 2 in chain else None

    def whole(union: Union) -> float:
        return replace(union, active_L=union.experts_L * union.width).read_bytes(model)

    for n in cfg.union.rows:
        union = chain[n]
        yield {
            "n": n, "by_chance": E * woken(k / E, n), "overlap": overlap,
            "by_overlap": None if overlap is None else E * woken(k / E, n, overlap),
            "experts": float(union.experts_L.mean()), "idle": float(union.idle_L.mean()),
            "rows_an_expert": union.rows_an_expert,
            "v_by_chance": traffic.read_weights(n) / traffic.weight_bytes,
            "v_woken": whole(union) / whole(one), "v_active": union.read_bytes(model) / one.read_bytes(model),
            "v_measured": measured.get(n), "dense_idle": dense and float(dense[n].idle_L.mean()),
        }  # fmt: skip


def parts(
    model: Model, curves: Mapping[str, Unions], found: Sequence[Row], accepted: Mapping[str, Mapping[str, Any]],
    dense: str | None,
) -> Iterator[Table | str]:  # fmt: skip
    """Experts by kind of rows, idle neurons and times, one layer after the other, and how drafts were accepted."""
    names = [*curves]
    yield f"experts of {model.config.n_experts} that n rows wake, mean over the layers"
    table = tables.new("n", "by chance", "by overlap", *names, left=())
    for row in found:
        means = (curves[name][row["n"]].experts_L.mean() if row["n"] in curves[name] else None for name in names)
        guesses = (row["by_chance"], row["by_overlap"])
        table.add_row(str(row["n"]), *(tables.cell(u, ".2f") for u in (*guesses, *means)))
    yield table
    yield "chains: neurons idle in all rows that chose their expert; v(n) by bytes and measured"
    idle = ("idle", *([f"of {Path(dense).stem}"] if dense else []))
    table = tables.new("n", "rows an expert", *idle, "v by chance", "woken", "and active", "measured", left=())
    for row in found:
        shares = [f"{row['idle']:.1%}", *([f"{row['dense_idle']:.1%}"] if dense else [])]
        times = (tables.cell(row[name], ".2f") for name in ("v_by_chance", "v_woken", "v_active", "v_measured"))
        table.add_row(str(row["n"]), f"{row['rows_an_expert']:.2f}", *shares, *times)
    yield table
    n = found[-1]["n"]
    yield f"{n} rows, layer by layer: experts, and idle of chains"
    there = [name for name in names if n in curves[name]]
    table = tables.new("layer", *there, "idle", left=())
    for layer, idle_share in enumerate(curves[CHAIN][n].idle_L):
        experts = (f"{curves[name][n].experts_L[layer]:.2f}" for name in there)
        table.add_row(str(layer), *experts, f"{idle_share:.1%}")
    yield table
    for name, rates in accepted.items():
        length, per_pass = (rates[key] for key in ("mean_acceptance_length", "tokens_per_target_pass"))
        yield f"{name}: acceptance length {tables.cell(length, '.2f')}, {tables.cell(per_pass, '.2f')} tokens a pass"


def figure(curves: Mapping[str, Unions], found: Sequence[Row], title: str) -> Figure:
    """Woken experts, and idle neurons, against the rows of a pass."""
    rows = tuple(
        {"rows_of": name, "n": n, "experts": float(u.experts_L.mean()), "idle": float(u.idle_L.mean()), "sets": u.sets}
        for name, unions in curves.items() for n, u in unions.items()
    )  # fmt: skip

    def draw(canvas: Canvas, rows: Sequence[Row]) -> None:
        left, right = canvas.subplots(1, 2)
        ns = [row["n"] for row in found]
        for name, _, own in plots.series(rows, "rows_of"):
            for axes, key in ((left, "experts"), (right, "idle")):
                axes.plot([row["n"] for row in own], [row[key] for row in own], marker="o", label=name)
        left.plot(ns, [row["by_chance"] for row in found], "--", color=FAINT, label="by chance")
        if found[0]["dense_idle"] is not None:
            right.plot(ns, [row["dense_idle"] for row in found], "--", color=FAINT, label="a dense ReLU model, chain")
        left.set(title=title, xlabel="rows of a pass", ylabel="experts of a layer", ylim=(0, None))
        right.set(xlabel="rows of a pass", ylabel="idle in all rows of a woken expert", ylim=(0, 1))
        left.legend()
        right.legend()

    caption = "Experts that rows wake together, and the share of those experts' neurons that is idle in all their rows."
    return Figure("union", title, caption, rows, draw, (10.0, 4.0))
