"""`kind: quant_table`: one model in several types of weights, as a table: bytes, perplexity, KL to float32, speed."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specsparse.engine.gguf import requantise
from specsparse.engine.gguf.reader import FLOAT_TYPES, open_gguf
from specsparse.engine.model import Model
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.kinds import perplexity
from specsparse.experiments.kinds.perplexity import PerplexitySettings
from specsparse.measure import conditions, trials
from specsparse.measure.conditions import Conditions, ResultConditions
from specsparse.measure.trials import Ours, requantised
from specsparse.models import catalogue
from specsparse.report import display
from specsparse.runtime.perplexity import Windows
from specsparse.support import tables, terminal
from specsparse.support.options import Count, Size

DEFINITIONS = {
    **perplexity.DEFINITIONS,
    "bits_per_weight": "8 x bytes of all tensors / weights",
    "decode, prompt": "tokens per second, median of the timings, and the samples behind it",
}
BASE_IS_QUANTISED = "the model is quantised already: the types are made of its rounded weights, the KL is from those"


@dataclass(frozen=True)
class QuantTable:
    """A row for each type, and notes for the reader."""

    rows: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def conditions(self) -> Conditions:
        """Of all rows together, which were timed one after the other."""
        read = [row["conditions"]["read_bandwidth"] for row in self.rows if row["conditions"]]
        return Conditions(statistics.median(read), conditions.deviation(read)) if read else Conditions()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Doubts of the times, row by row and between rows; every row's plain decoding is its own."""
        taken = [(row["file"], Conditions.from_dict(row["conditions"] or {})) for row in self.rows]
        apart = conditions.differ([ResultConditions(found, work=name) for name, found in taken])
        return (*([apart] if apart else []), *conditions.all_busy(taken))


@dataclass(frozen=True)
class QuantTableSpec:
    """The rows and their timings; the text is that of `perplexity`.

    Attributes:
        types: to quantise the model to.
        files: further GGUF files of the same model.
        pp, tg: tokens of prompt and of decoding to time; 0: not timed.
        timings: of each.
    """

    types: tuple[str, ...] = ("F16", "Q8_0", "Q4_1", "Q4_0")
    files: tuple[str, ...] = ()
    pp: Size = 512
    tg: Size = 64
    timings: Count = 3


@dataclass(frozen=True, kw_only=True)
class QuantTableSettings(PerplexitySettings):
    quant_table: QuantTableSpec = QuantTableSpec()


class Quantisations(Kind[QuantTableSettings]):
    """One model in several types of weights: bytes, perplexity, KL to float32, speed."""

    takes_ffn = False

    def check(self, cfg: QuantTableSettings) -> None:
        perplexity.Perplexity().check(cfg)
        for name in cfg.quant_table.types:
            requantise.kind_of(name)
        for file in cfg.quant_table.files:
            catalogue.resolve(file)

    def run(self, cfg: QuantTableSettings, ctx: RunContext) -> RunResult:
        """Makes the files (kept in the cache), scores and times each."""
        source = Path(catalogue.resolve(cfg.model.path))
        f = open_gguf(source)
        notes = () if f.main_type() in FLOAT_TYPES else (BASE_IS_QUANTISED,)
        files = [requantised(source, name, ctx.console) for name in cfg.quant_table.types]
        files += [Path(catalogue.resolve(file)) for file in cfg.quant_table.files]
        text = perplexity.cut(cfg, Tokenizer.from_metadata(f.metadata, where=str(source)))
        with perplexity.base_probs(cfg, ctx, text) as probs:
            found = QuantTable(tuple(_row(cfg, ctx, file, text, probs) for file in files), notes)
        names = {None: "nothing", perplexity.F32: "the model's own weights in float32"}
        base = names.get(cfg.perplexity.base, cfg.perplexity.base)
        return RunResult(
            {"rows": found.rows, "notes": notes, "conditions": found.conditions.to_dict()},
            found,
            shown=[
                table(found.rows),
                f"{text.scored} tokens scored; KL from {base}",
                *notes,
                *display.condition_lines(found.conditions, None, found.warnings),
            ],
            definitions=DEFINITIONS,
            objective=max((row["decode"]["median"] for row in found.rows if row["decode"]), default=None),
        )


def _row(
    cfg: QuantTableSettings, ctx: RunContext, path: Path, text: Windows, probs: np.ndarray | None
) -> dict[str, Any]:
    """One line of the table: the file's size, its scores and its timings."""
    f = open_gguf(path)
    name, size = f.main_type(), f.sizes()
    with terminal.loading(ctx.console, f"loading {path.name}") as progress:
        model = ctx.engine.load(path, progress=progress, **cfg.model.overrides())
    found = perplexity.scored(model, text, ctx, name, base=probs).summary()
    sizes = {key: size[key] for key in ("bytes", "bits_per_weight")}
    return {"type": name, "file": path.name, **sizes, **found, **_speed(cfg, model, name, ctx)}


def _speed(cfg: QuantTableSettings, model: Model, name: str, ctx: RunContext) -> dict[str, Any]:
    """Tokens per second of decoding and of a prompt, with their conditions; None if they are not timed."""
    spec = cfg.quant_table
    plan = trials.TrialPlan(pp=spec.pp, tg=spec.tg, repeats=spec.timings)
    if not plan.tests():
        return {"prompt": None, "decode": None, "conditions": None}
    side = Ours(model, room=max(spec.pp, spec.tg + 1))
    with terminal.busy(ctx.console, f"timing {name}"):
        trials.warm_up(plan, side)
        found = trials.run(plan, [side])
    rates = {t.name: trials.timings(found.seconds[t.name][side.name], t.n)["tokens_per_second"] for t in plan.tests()}
    decode, read = rates.get(f"tg{spec.tg}"), found.machine.read
    plain = decode and decode["median"]
    taken = Conditions(statistics.median(read), conditions.deviation(read), plain_tokens_per_second=plain)
    return {"prompt": rates.get(f"pp{spec.pp}"), "decode": decode, "conditions": taken.to_dict()}


def table(rows: tuple[dict[str, Any], ...]) -> Table:
    quality = ("bits/weight", "perplexity", "KL, nats", "same top")
    out = tables.new("type", "MiB", *quality, "decode, tok/s", "prompt, tok/s")
    for row in rows:
        kl = row["kl_mean"]
        out.add_row(
            row["type"],
            f"{row['bytes'] / 2**20:.1f}",
            f"{row['bits_per_weight']:.2f}",
            f"{row['perplexity']:.3f} +- {row['perplexity_error']:.3f}",
            "-" if kl is None else f"{kl:.5f} +- {row['kl_error']:.5f}",
            tables.cell(row["same_top"], ".1%"),
            *(tables.cell(row[key] and row[key]["median"], ".1f") for key in ("decode", "prompt")),
        )
    return out
