"""`kind: perplexity`: how well a model predicts a text, and how far its distribution is from another's.

`kind: quant_table`: the same of one model in several types of weights, as a table with bytes and speed.
"""

import statistics
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from specsparse.engine.gguf import requantise
from specsparse.engine.gguf.reader import FLOAT_TYPES, open_gguf
from specsparse.engine.model import Model
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.experiments import sparse_model
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.settings import ModelSettings
from specsparse.experiments.trackers.base import Series
from specsparse.measure import conditions, trials
from specsparse.measure.conditions import Conditions, ResultConditions
from specsparse.measure.trials import Ours, requantised
from specsparse.models import catalogue
from specsparse.report import display
from specsparse.runtime.perplexity import Scores, Windows, score, windows
from specsparse.support import files, tables, terminal
from specsparse.support.files import Json
from specsparse.support.options import Count, Range, Size, check_at_most

F32 = "f32"
"""The base that is the same file computed in float32."""
WINDOWS = Series("so_far", "window")
"""Over the windows that are read; only the last point is the text's."""
DEFINITIONS = {
    "perplexity": "exp of the mean negative log-likelihood of the scored tokens, llama.cpp's windows",
    "kl_mean": "mean KL(base, model) of the next token's distribution over the scored tokens, in nats",
    "same_top": "share of the scored tokens at which both find the same token most likely",
}

QUANT_DEFINITIONS = {
    **DEFINITIONS,
    "bits_per_weight": "8 x bytes of all tensors / weights",
    "decode, prompt": "tokens per second, median of the timings, and the samples behind it",
}
BASE_IS_QUANTISED = "the model is quantised already: the types are made of its rounded weights, the KL is from those"


@dataclass(frozen=True)
class PerplexitySpec:
    """The text and its windows; see `specsparse.runtime.perplexity.windows`."""

    text: str | None = None  # a file; None is the prompts of the data group, one after the other
    context: Annotated[int, Range(4)] = 512
    stride: Size = 0
    chunks: Count | None = None  # at most so many windows; None for all
    # the distribution that the KL is from: "f32" is the same weights in float32, with all neurons if `ffn` says which
    # are computed; a model; None for no KL
    base: str | None = F32


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(ModelSettings):
    perplexity: PerplexitySpec = PerplexitySpec()


class Perplexity(Kind[PerplexitySettings]):
    """How well a model predicts a text, after the base has, and how far its distribution is from the base's."""

    timed = False
    on_mesh = True

    def check(self, cfg: PerplexitySettings) -> None:
        spec = cfg.perplexity
        catalogue.resolve(cfg.model.path)
        sparse_model.check(cfg)
        if spec.base not in (None, F32):
            catalogue.resolve(spec.base)
        check_at_most("perplexity", spec, stride="context")
        read_text(cfg)

    def run(self, cfg: PerplexitySettings, ctx: RunContext) -> RunResult:
        model = sparse_model.load(cfg, ctx)
        text = cut(cfg, model.tokenizer)
        with base_probs(cfg, ctx, text) as probs:
            found = scored(model, text, ctx, cfg.model.path, base=probs, live=True)
        facts = {"base": cfg.perplexity.base, "windows": text.tokens.shape[0], "window": text.tokens.shape[1]}
        summary: Json = {**found.summary(), **facts, **sparse_model.label(model)}
        shown = [
            f"{summary['tokens']} tokens scored in {summary['windows']} windows of {summary['window']}",
            f"perplexity {summary['perplexity']:.4f} +- {summary['perplexity_error']:.4f}",
        ]
        if summary["kl_mean"] is not None:
            base = "the same weights in float32" if summary["base"] == F32 else summary["base"]
            kl = "mean {kl_mean:.6f} +- {kl_error:.6f}, median {kl_median:.6f}, 99 % {kl_99:.6f}, most {kl_max:.6f}"
            shown += [f"KL from {base}: {kl.format(**summary)} nats"]
            shown += [f"the same token most likely: {summary['same_top']:.2%}"]
        return RunResult(summary, shown=shown, definitions=DEFINITIONS, objective=-summary["perplexity"])


def read_text(cfg: PerplexitySettings) -> str:
    """The text to score. UserError: a file that is not there or no UTF-8."""
    if cfg.perplexity.text is None:
        return "\n\n".join(prompt.text for prompt in cfg.data.prompts())
    path = Path(cfg.perplexity.text).expanduser()
    return files.read_text(path, f"perplexity.text={path}")


def cut(cfg: PerplexitySettings, tokenizer: Tokenizer) -> Windows:
    spec, ids = cfg.perplexity, tokenizer.encode(read_text(cfg), add_special=True)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    return windows(ids, context=spec.context, stride=spec.stride, chunks=spec.chunks, bos=bos)


def scored(
    model: Model, text: Windows, ctx: RunContext, name: str, *,
    base: np.ndarray | None = None, live: bool = False, **options: Any,
) -> Scores:  # fmt: skip
    """`score` with a bar; `live`: and with a point for each window. UserError: a base of another vocabulary."""
    if base is not None and base.shape[1] != model.config.vocab_size:
        raise UserError(f"{name} has {model.config.vocab_size} tokens and perplexity.base has {base.shape[1]}")
    with ctx.counting(f"reading the text: {name}", len(text.tokens)) as step:

        def progress(done: int, found: Scores) -> None:
            step(done)
            if live:
                kl = None if found.kl is None else found.kl.mean()
                ctx.tracker.point(WINDOWS, {"window": done, "perplexity": np.exp(found.nll.mean()), "kl": kl})

        return score(model, text, base=base, progress=progress, **options)


@contextmanager
def base_probs(cfg: PerplexitySettings, ctx: RunContext, text: Windows) -> Generator[np.ndarray | None]:
    """Log-probabilities float32[N, V] of the base on the text, in a file that goes with the block."""
    base = cfg.perplexity.base
    if base is None:
        yield None
        return
    path, options = base, {}
    if base == F32:
        whole = {} if cfg.ffn.name is None else {"ffn": "dense"}
        path, options = cfg.model.path, {"float_weights": True, "kv_dtype": "f32", **whole}
    model = ctx.load(replace(cfg.model, path=path), title=f"{path} as the base", **options)
    ctx.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ctx.directory, prefix=".base-") as folder:
        shape = (text.scored, model.config.vocab_size)
        probs = np.lib.format.open_memmap(Path(folder) / "law.npy", mode="w+", dtype=np.float32, shape=shape)
        scored(model, text, ctx, f"{path}, the base", keep=probs)
        del model  # its weights need not stay beside the next model's
        yield probs
        del probs


@dataclass(frozen=True)
class QuantTableSpec:
    """The rows and their timings; the text is that of `perplexity`."""

    types: tuple[str, ...] = ("F16", "Q8_0", "Q4_1", "Q4_0")  # to quantise the model to
    files: tuple[str, ...] = ()  # further GGUF files of the same model
    pp: Size = 512  # tokens of a prompt to time; 0: not timed
    tg: Size = 64  # tokens of decoding to time; 0: not timed
    timings: Count = 3


@dataclass(frozen=True, kw_only=True)
class QuantTableSettings(PerplexitySettings):
    quant_table: QuantTableSpec = QuantTableSpec()


class Quantisations(Kind[QuantTableSettings]):
    """One model in several types of weights: bytes, perplexity, KL to float32, speed."""

    takes_ffn = False

    def check(self, cfg: QuantTableSettings) -> None:
        Perplexity().check(cfg)
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
        text = cut(cfg, Tokenizer.from_metadata(f.metadata, where=str(source)))
        with base_probs(cfg, ctx, text) as probs:
            rows = [_row(cfg, ctx, file, text, probs) for file in files]
        names = {None: "nothing", F32: "the model's own weights in float32"}
        base = names.get(cfg.perplexity.base, cfg.perplexity.base)
        read = [row["conditions"]["read_bandwidth"] for row in rows if row["conditions"]]
        taken = Conditions(statistics.median(read), conditions.deviation(read)) if read else Conditions()
        return RunResult(
            {"rows": rows, "notes": notes, "conditions": taken.to_dict()},
            rows,
            shown=[
                table(rows),
                f"{text.scored} tokens scored; KL from {base}",
                *notes,
                *display.condition_lines(taken, None, doubts(rows)),
            ],
            definitions=QUANT_DEFINITIONS,
            objective=max((row["decode"]["median"] for row in rows if row["decode"]), default=None),
        )


def _row(
    cfg: QuantTableSettings, ctx: RunContext, path: Path, text: Windows, probs: np.ndarray | None
) -> dict[str, Any]:
    """The file's size, its scores, and tokens per second of decoding and of a prompt; None if they are not timed."""
    f = open_gguf(path)
    name, size = f.main_type(), f.sizes()
    model = ctx.load(replace(cfg.model, path=str(path)), title=path.name)
    spec, speed = cfg.quant_table, dict.fromkeys(("prompt", "decode", "conditions"))
    plan, room = trials.TrialPlan(pp=spec.pp, tg=spec.tg, repeats=spec.timings), max(spec.pp, spec.tg + 1)
    if plan.tests():
        trials.need_room(model.config, room, "quant_table.pp or quant_table.tg")
    found = scored(model, text, ctx, name, base=probs).summary()
    row = {"type": name, "file": path.name, **{key: size[key] for key in ("bytes", "bits_per_weight")}, **found}
    if not plan.tests():
        return row | speed
    side = Ours(model, room=room)
    with terminal.busy(ctx.console, f"timing {name}"):
        trials.warm_up(plan, side)
        timed = trials.run(plan, [side])
    rates = {t.name: trials.timings(timed.seconds[t.name][side.name], t.n)["tokens_per_second"] for t in plan.tests()}
    decode, read = rates.get(f"tg{spec.tg}"), timed.machine.read
    plain = decode and decode["median"]
    taken = Conditions(statistics.median(read), conditions.deviation(read), plain_tokens_per_second=plain)
    return row | {"prompt": rates.get(f"pp{spec.pp}"), "decode": decode, "conditions": taken.to_dict()}


def doubts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Doubts of the times, row by row and between rows; every row's plain decoding is its own."""
    taken = [(row["file"], Conditions.from_dict(row["conditions"] or {})) for row in rows]
    apart = conditions.differ([ResultConditions(found, work=name) for name, found in taken])
    return [*([apart] if apart else []), *conditions.all_busy(taken)]


def table(rows: Sequence[dict[str, Any]]) -> Table:
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
