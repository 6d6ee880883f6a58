"""`kind: perplexity`: how well a model predicts a text, and how far its distribution is from another's."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.experiments import sparse_model
from specsparse.experiments.kind import Kind, RunContext, RunResult
from specsparse.experiments.settings import ModelSettings
from specsparse.models import catalogue
from specsparse.runtime.perplexity import Scores, Windows, score, windows
from specsparse.support import terminal
from specsparse.support.options import Count, Range, Size

F32 = "f32"
"""The base that is the same file computed in float32."""
DEFINITIONS = {
    "perplexity": "exp of the mean negative log-likelihood of the scored tokens, llama.cpp's windows",
    "kl_mean": "mean KL(base, model) of the next token's distribution over the scored tokens, in nats",
    "same_top": "share of the scored tokens at which both find the same token most likely",
}


@dataclass(frozen=True)
class PerplexitySpec:
    """The text and its windows; see `specsparse.runtime.perplexity.windows`.

    Attributes:
        text: a text file, read as it is; None is the prompts of the data group, one after the other.
        context, stride: of the windows.
        chunks: at most so many windows; None for all.
        base: whose distribution the KL is from: "f32", the same weights computed in float32, and with all neurons if
            `ffn` says which are computed; a model; None for no KL.
    """

    text: str | None = None
    context: Annotated[int, Range(4)] = 512
    stride: Size = 0
    chunks: Count | None = None
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
        if spec.stride > spec.context:
            raise UserError(f"perplexity.stride={spec.stride}: must be at most perplexity.context={spec.context}")
        read_text(cfg)

    def run(self, cfg: PerplexitySettings, ctx: RunContext) -> RunResult:
        model = sparse_model.load(cfg, ctx)
        text = cut(cfg, model.tokenizer)
        with base_probs(cfg, ctx, text) as probs:
            found = scored(model, text, ctx, cfg.model.path, base=probs)
        facts = {"base": cfg.perplexity.base, "windows": text.tokens.shape[0], "window": text.tokens.shape[1]}
        summary = {**found.summary(), **facts, **sparse_model.label(model)}
        shown = [
            f"{summary['tokens']} tokens scored in {summary['windows']} windows of {summary['window']}",
            f"perplexity {summary['perplexity']:.4f} +- {summary['perplexity_error']:.4f}",
        ]
        if summary["kl_mean"] is not None:
            base = "the same weights in float32" if summary["base"] == F32 else summary["base"]
            kl = (
                "mean {kl_mean:.6f} +- {kl_error:.6f}, median {kl_median:.6f}, 99 % {kl_99:.6f}, most {kl_max:.6f} nats"
            )
            shown += [f"KL from {base}: {kl.format(**summary)}"]
            shown += [f"the same token most likely: {summary['same_top']:.2%}"]
        return RunResult(summary, shown=shown, definitions=DEFINITIONS, objective=-summary["perplexity"])


def read_text(cfg: PerplexitySettings) -> str:
    """The text to score: a file as it is, or the prompts of the data group with an empty line between them.

    Raises:
        UserError: a file that is not there or no UTF-8.
    """
    if cfg.perplexity.text is None:
        return "\n\n".join(prompt.text for prompt in cfg.data.prompts())
    path = Path(cfg.perplexity.text).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is no UTF-8 text"
        raise UserError(f"perplexity.text={path}: cannot be read: {reason}") from None


def cut(cfg: PerplexitySettings, tokenizer: Tokenizer) -> Windows:
    spec, ids = cfg.perplexity, tokenizer.encode(read_text(cfg), add_special=True)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    return windows(ids, context=spec.context, stride=spec.stride, chunks=spec.chunks, bos=bos)


def scored(
    model: Model, text: Windows, ctx: RunContext, name: str, *, base: np.ndarray | None = None, **options: Any
) -> Scores:
    """`score` with a bar. UserError: a base of another vocabulary."""
    if base is not None and base.shape[1] != model.config.vocab_size:
        raise UserError(f"{name} has {model.config.vocab_size} tokens and perplexity.base has {base.shape[1]}")
    with ctx.counting(f"reading the text: {name}", len(text.tokens)) as step:
        return score(model, text, base=base, progress=step, **options)


@contextmanager
def base_probs(cfg: PerplexitySettings, ctx: RunContext, text: Windows) -> Iterator[np.ndarray | None]:
    """Log-probabilities float32[N, V] of the base on the text, in a file that goes with the block."""
    base = cfg.perplexity.base
    if base is None:
        yield None
        return
    path, options = base, cfg.model.overrides()
    if base == F32:
        whole = {} if cfg.ffn.name is None else {"ffn": "dense"}
        path, options = cfg.model.path, {**options, "float_weights": True, "kv_dtype": "f32", **whole}
    with terminal.loading(ctx.console, f"loading {path} as the base") as progress:
        model = ctx.engine.load(path, progress=progress, **options)
    ctx.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ctx.directory, prefix=".base-") as folder:
        shape = (text.scored, model.config.vocab_size)
        probs = np.lib.format.open_memmap(Path(folder) / "law.npy", mode="w+", dtype=np.float32, shape=shape)
        scored(model, text, ctx, f"{path}, the base", keep=probs)
        del model  # its weights need not stay beside the next model's
        yield probs
        del probs
