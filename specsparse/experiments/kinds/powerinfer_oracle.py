"""`kind: powerinfer_oracle`: our logits and greedy tokens for a model against those that PowerInfer itself wrote.

The file of its results holds arrays by name: `tokens` int[n]; `MODEL/sparse`, `MODEL/allon` (threshold -1e30),
`MODEL/alloff` (1e30) and `MODEL/silu` f32[n, V], the logits of a model file's plain call and of other thresholds;
`MODEL/greedy_ids` int[n + m], a prompt of n tokens and what PowerInfer wrote after it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from specsparse import kernels
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import Engine, Kind, RunContext, RunResult
from specsparse.experiments.settings import ModelSettings
from specsparse.models import catalogue
from specsparse.support import tables, terminal
from specsparse.support.files import read_npz

LOGITS_FILE = "logits.npz"
VARIANTS: dict[str, dict[str, float]] = {
    "sparse": {},
    "allon": {"threshold": -1e30},
    "alloff": {"threshold": 1e30},
    "silu": {},
}
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
        """All limits are kept; without limits there is nothing to break."""
        return all(getattr(self, name) <= limit for name, limit in self.limits.items())


@dataclass(frozen=True)
class Agreement:
    """What was found.

    Attributes:
        logits: one entry a variant.
        greedy: (tokens that are equal, tokens compared), or None where PowerInfer wrote none.
        threads: thread counts that were tried; one without native kernels.
        identical: whether the logits had the same bits with each.
        faithful: whether PowerInfer's roundings were on; without them nothing but the bits is promised.
    """

    logits: tuple[Compared, ...]
    greedy: tuple[int, int] | None
    threads: tuple[int, ...]
    identical: bool
    faithful: bool

    @property
    def as_promised(self) -> bool:
        """Within the limits, the same greedy tokens, the same bits."""
        same = self.greedy is None or self.greedy[0] == self.greedy[1]
        return self.identical and (not self.faithful or (same and all(c.within for c in self.logits)))


@dataclass(frozen=True)
class PowerInferSpec:
    """What `kind: powerinfer_oracle` compares: PowerInfer's logits (None: logits.npz beside the model), threads."""

    logits: str | None = None
    threads: tuple[int, ...] = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class PowerInferSettings(ModelSettings):
    """What `kind: powerinfer_oracle` reads of a config."""

    powerinfer: PowerInferSpec = PowerInferSpec()


class PowerInferOracle(Kind[PowerInferSettings]):
    """A PowerInfer model's logits and greedy tokens against those that PowerInfer itself wrote."""

    timed = False

    def check(self, cfg: PowerInferSettings) -> None:
        """Files that are not there or not of this model, and thread counts below one are refused."""
        path = Path(catalogue.resolve(cfg.model.path))
        _variants(_results(cfg, path), path)
        if not cfg.powerinfer.threads or any(t < 1 for t in cfg.powerinfer.threads):
            raise UserError("powerinfer.threads must be counts of at least 1, such as [1,2,4]")

    def run(self, cfg: PowerInferSettings, ctx: RunContext) -> RunResult:
        """Compares.

        Raises:
            UserError: results that do not fit the model.
        """
        engine = ctx.engine
        path = Path(catalogue.resolve(cfg.model.path))
        wanted = _results(cfg, path)
        faithful = cfg.ffn.faithful_f16
        limits = LIMITS.get(open_gguf(path).tensors["blk.0.ffn_up.weight"].type.name, {}) if faithful else {}
        found, first = [], None
        for variant in _variants(wanted, path):
            options = {**cfg.model.overrides(), **VARIANTS[variant], "faithful_f16": faithful}
            with terminal.loading(ctx.console, f"loading {path.name} for {variant}") as progress:
                model = engine.load(str(path), progress=progress, **options)
            first = first or model
            found.append(_compared(variant, model.logits(wanted["tokens"]), wanted[f"{_stem(path)}/{variant}"], limits))
        tried, identical = _over_threads(first, wanted["tokens"], cfg.powerinfer.threads)
        greedy = _greedy(engine, first, wanted.get(f"{_stem(path)}/greedy_ids"), prompt=len(wanted["tokens"]))
        result = Agreement(tuple(found), greedy, tried, identical, faithful)
        title = Text(f"{cfg.name}: {path.name} against PowerInfer's logits", style="bold")
        said = [Text(line, style="green" if good else "bold red") for line, good in _lines(result)]
        return RunResult(
            {**asdict(result), "as_promised": result.as_promised}, result, shown=[title, _table(result), *said],
            as_promised=result.as_promised, objective=-max(c.max for c in result.logits),
        )  # fmt: skip


def _results(cfg: PowerInferSettings, path: Path) -> dict[str, np.ndarray]:
    file = Path(cfg.powerinfer.logits).expanduser() if cfg.powerinfer.logits else path.parent / LOGITS_FILE
    if not file.is_file():
        raise UserError(
            f"no such file of PowerInfer's results: {file}; give a model that "
            "PowerInfer ran, model.path=FILE.powerinfer.gguf, and what it wrote, powerinfer.logits=FILE.npz"
        )
    return read_npz(file)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gguf").removesuffix(".powerinfer")


def _variants(names: Any, path: Path) -> list[str]:
    found = [v for v in VARIANTS if f"{_stem(path)}/{v}" in names]
    if not found or "tokens" not in names:
        known = sorted({n.split("/")[0] for n in names if "/" in n})
        raise UserError(
            f"PowerInfer's results hold no logits of {_stem(path)!r}; they are of {', '.join(known) or 'no model'}"
        )
    return found


def _compared(variant: str, ours: np.ndarray, theirs: np.ndarray, limits: Mapping[str, float]) -> Compared:
    if ours.shape != theirs.shape:
        raise UserError(
            f"PowerInfer's logits of {variant} have the shape {theirs.shape} and ours {ours.shape}: another model"
        )
    error = np.abs(ours.astype(np.float64) - theirs)
    q99 = float(np.quantile(error, 0.99))
    return Compared(variant, len(error), float(error.max()), float(error.mean()), q99, limits)


def _over_threads(model: Model, tokens: np.ndarray, counts: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    if model.kernels.name != "native":
        return (1,), True
    before, out = kernels.status()["threads"], []
    try:
        for count in counts:
            kernels.set_threads(count)
            out.append(model.logits(tokens))
    finally:
        kernels.set_threads(before)
    return counts, all(np.array_equal(out[0], other) for other in out)


def _greedy(engine: Engine, model: Model, ids: np.ndarray | None, *, prompt: int) -> tuple[int, int] | None:
    if ids is None:
        return None
    theirs = ids[prompt:].tolist()
    ours = engine.generate(model, ids[:prompt].tolist(), max_tokens=len(theirs), ignore_eos=True).token_ids
    return sum(a == b for a, b in zip(ours, theirs, strict=True)), len(theirs)


def _table(found: Agreement) -> Table:
    out = tables.new("logits", "rows", "max error", "mean error", "99 % within", "limits")
    for c in found.logits:
        limits = ", ".join(f"{name} {limit:.0e}" for name, limit in c.limits.items())
        verdict = f"{limits}: {'kept' if c.within else 'BROKEN'}" if limits else "none outside the faithful mode"
        cells = [c.variant, str(c.rows), f"{c.max:.2e}", f"{c.mean:.2e}", f"{c.q99:.2e}", verdict]
        out.add_row(*cells, style=None if c.within else "bold red")
    return out


def _lines(found: Agreement) -> list[tuple[str, bool]]:
    lines = []
    if found.greedy is not None:
        same, total = found.greedy
        lines.append((f"greedy tokens: {same} of {total} equal PowerInfer's", same == total))
    if len(found.threads) > 1:
        counts = ", ".join(map(str, found.threads))
        word = "the same bits" if found.identical else "NOT the same bits"
        lines.append((f"{word} with {counts} threads", found.identical))
    return lines
