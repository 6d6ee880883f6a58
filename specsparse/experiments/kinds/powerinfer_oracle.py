"""`kind: powerinfer_oracle`: our logits and greedy tokens for a model against those that PowerInfer itself wrote.

The file of its results holds arrays by name: `tokens` int[n]; `MODEL/sparse`, `MODEL/allon` (threshold -1e30),
`MODEL/alloff` (1e30) and `MODEL/silu` f32[n, V], the logits of a model file's plain call and of other thresholds;
`MODEL/greedy_ids` int[n + m], a prompt of n tokens and what PowerInfer wrote after it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.text import Text

from specsparse import kernels
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.settings import ModelSettings
from specsparse.models import catalogue
from specsparse.support import tables
from specsparse.support.files import read_npz
from specsparse.support.options import Count

VARIANTS = {"sparse": {}, "allon": {"threshold": -1e30}, "alloff": {"threshold": 1e30}, "silu": {}}
"""Options of `load` for each kind of logits."""
LIMITS = {"F16": {"max": 2e-3, "mean": 3e-4}, "Q4_0": {"max": 2e-2, "q99": 1e-4}}
"""Largest errors in the faithful mode by type of the weights. Float sums differ in the last bit, which now and then
rounds an activation the other way; the sums of Q4_0 are of whole numbers, so that there only few logits differ."""


@dataclass(frozen=True)
class Compared:
    """Logits of one variant: |ours - PowerInfer's| over all rows and tokens, and the limits they are held to."""

    variant: str
    rows: int
    max: float
    mean: float
    q99: float
    limits: Mapping[str, float]

    @property
    def within(self) -> bool:
        return all(getattr(self, name) <= limit for name, limit in self.limits.items())


@dataclass(frozen=True)
class Agreement:
    logits: tuple[Compared, ...]
    greedy: tuple[int, int] | None  # (tokens that are equal, tokens compared), or None if PowerInfer wrote none
    threads: tuple[int, ...]  # thread counts that were tried; one without native kernels
    identical: bool  # whether the logits had the same bits with each
    faithful: bool  # whether PowerInfer's roundings were on; without them nothing but the bits is promised

    @property
    def as_promised(self) -> bool:
        same = self.greedy is None or self.greedy[0] == self.greedy[1]
        return self.identical and (not self.faithful or (same and all(c.within for c in self.logits)))


@dataclass(frozen=True)
class PowerInferSpec:
    """PowerInfer's logits (None: logits.npz beside the model), and thread counts to compare."""

    logits: str | None = None
    threads: tuple[Count, ...] = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class PowerInferSettings(ModelSettings):
    powerinfer: PowerInferSpec = PowerInferSpec()


class PowerInferOracle(Kind[PowerInferSettings]):
    """A PowerInfer model's logits and greedy tokens against those that PowerInfer itself wrote."""

    timed = False

    def check(self, cfg: PowerInferSettings) -> None:
        _results(cfg)

    def run(self, cfg: PowerInferSettings, ctx: RunContext) -> RunResult:
        path, faithful = Path(catalogue.resolve(cfg.model.path)), cfg.ffn.faithful_f16
        theirs, greedy = _results(cfg), None
        tokens, ids = theirs.pop("tokens"), theirs.pop("greedy_ids", None)
        limits = LIMITS.get(open_gguf(path).tensors["blk.0.ffn_up.weight"].type.name, {}) if faithful else {}
        found: list[Compared] = []
        first: Model | None = None
        for variant, logits in theirs.items():
            title = f"{path.name} for {variant}"
            model = ctx.load(cfg.model, title=title, faithful_f16=faithful, **VARIANTS[variant])
            first, ours = first or model, model.logits(tokens)
            if ours.shape != logits.shape:
                shapes = f"{variant} have the shape {logits.shape} and ours {ours.shape}"
                raise UserError(f"PowerInfer's logits of {shapes}: another model")
            error = np.abs(ours.astype(np.float64) - logits)
            largest, mean, q99 = (float(x) for x in (error.max(), error.mean(), np.quantile(error, 0.99)))
            found.append(Compared(variant, len(error), largest, mean, q99, limits))
        assert first is not None  # `_results` found one variant at least
        tried, same_bits = (1,), []
        if first.kernels.name == "native":
            before, tried = kernels.status()["threads"], cfg.powerinfer.threads
            try:
                for count in tried:
                    kernels.set_threads(count)
                    same_bits.append(first.logits(tokens))
            finally:
                kernels.set_threads(before)
        identical = all(np.array_equal(same_bits[0], other) for other in same_bits)
        if ids is not None:
            prompt, wanted = ids[: len(tokens)].tolist(), ids[len(tokens) :].tolist()
            ours = ctx.engine.generate(first, prompt, max_tokens=len(wanted), ignore_eos=True).token_ids
            greedy = sum(a == b for a, b in zip(ours, wanted, strict=True)), len(wanted)
        result = Agreement(tuple(found), greedy, tried, identical, faithful)
        said = []
        if greedy is not None:
            said.append((f"greedy tokens: {greedy[0]} of {greedy[1]} equal PowerInfer's", greedy[0] == greedy[1]))
        if len(tried) > 1:
            word = "the same bits" if identical else "NOT the same bits"
            said.append((f"{word} with {', '.join(map(str, tried))} threads", identical))
        title = Text(f"{cfg.name}: {path.name} against PowerInfer's logits", style="bold")
        table = tables.new("logits", "rows", "max error", "mean error", "99 % within", "limits")
        for c in found:
            held = ", ".join(f"{name} {limit:.0e}" for name, limit in c.limits.items())
            verdict = f"{held}: {'kept' if c.within else 'BROKEN'}" if held else "none outside the faithful mode"
            errors = (f"{error:.2e}" for error in (c.max, c.mean, c.q99))
            table.add_row(c.variant, str(c.rows), *errors, verdict, style=None if c.within else "bold red")
        lines = [Text(line, style="green" if good else "bold red") for line, good in said]
        return RunResult(
            {**asdict(result), "as_promised": result.as_promised}, result, shown=[title, table, *lines],
            as_promised=result.as_promised, objective=-max(c.max for c in result.logits),
        )  # fmt: skip


def _results(cfg: PowerInferSettings) -> dict[str, np.ndarray]:
    """PowerInfer's arrays for this model, logits by variant. UserError: no such file, or no array of this model."""
    path, given = Path(catalogue.resolve(cfg.model.path)), cfg.powerinfer.logits
    file = Path(given).expanduser() if given else path.parent / "logits.npz"
    if not file.is_file():
        raise UserError(
            f"no such file of PowerInfer's results: {file}; give a model that "
            "PowerInfer ran, model.path=FILE.powerinfer.gguf, and what it wrote, powerinfer.logits=FILE.npz"
        )
    arrays, stem = read_npz(file), path.name.removesuffix(".gguf").removesuffix(".powerinfer")
    found = {name: arrays[f"{stem}/{name}"] for name in (*VARIANTS, "greedy_ids") if f"{stem}/{name}" in arrays}
    if not VARIANTS.keys() & found.keys() or "tokens" not in arrays:
        known = ", ".join(sorted({name.split("/")[0] for name in arrays if "/" in name}))
        raise UserError(f"PowerInfer's results hold no logits of {stem!r}; they are of {known or 'no model'}")
    return {"tokens": arrays["tokens"], **found}
