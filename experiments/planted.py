"""Claim: on layers of Llama-2-7B's shape with 10 % of the neurons active, speculation and sparsity together are at
least 1.3 times as fast as the better of the two alone, and a pass of n rows takes the time of the bytes that it reads.

Writes a model with planted sparsity (two layers, F16 or Q4_0, predictors of rank 1024; 0.3 to 0.9 GB, kept): random
weights, and predictors that keep a known share of the neurons, with a power law of frequencies and another set for each
token. The text means nothing; what a pass reads is what such a model would read. Then measures forwards of n rows
beside the union of their neurons, and runs `kind: spec_sparse` with synthetic acceptance 0.7 and the draft length that
pays best by those times of the sparse model.

Expected: both together >= 1.3; n rows within 10 % of (dense + union(n)) bytes / bandwidth while memory is the limit.
The down matrix of q4_0 has one scale, so that the dense model has it in Q4_0 too, turned without loss.
Run time: four minutes for f16, two of them to write the model.
Command: python experiments/planted.py --folder planted --type f16
"""

import argparse
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

import specsparse
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import POWERINFER_MAGIC, open_gguf
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.measure import machine
from specsparse.run import main as run
from specsparse.speculative.expected import expected_tokens
from specsparse.support.interleaved import interleaved
from specsparse.testing import random_quantised
from specsparse.testing.tiny import metadata_of, tiny_config

ROWS = (1, 2, 3, 4, 5, 8)
_ACCEPTANCE = 0.7
"""Of `drafter=synthetic`, for each token."""
EXPONENT = 1.25
"""Of the power law: 26 % of the neurons hold 80 % of the activations, as PowerInfer found (arXiv:2312.12456)."""
_MOST = 0.95
_BIAS = 32
"""Rows of fc1 that read the channel which all residuals share: a block of fc2, so that Q4_0 keeps it exactly."""
_LEVEL = 8.0
"""What all embeddings hold in channel 0."""


def power_law(count: int, mean: float, *, seed: int = 0) -> np.ndarray:
    """float64[count]: frequencies of that mean, proportional to rank^-EXPONENT up to a ceiling, in random order.

    Raises:
        ValueError: the mean is not between 0 and 0.9.
    """
    if not 0 < mean < 0.9:
        raise ValueError(f"a share of {mean} active neurons must lie between 0 and 0.9")
    shape = ((np.arange(count) + 0.5) / count) ** -EXPONENT
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * shape, _MOST).mean() < mean else (low, middle)
    return np.random.default_rng(seed).permutation(np.minimum(low * shape, _MOST))


def write_planted_powerinfer(
    path: str | os.PathLike[str],
    *,
    out_type: str = "q4_0",
    active: float = 0.1,
    rank: int = 1024,
    n_layers: int = 2,
    d_model: int = 4096,
    d_ff: int = 11008,
    n_heads: int = 32,
    vocab_size: int = 512,
    context_length: int = 2048,
    seed: int = 0,
) -> Path:
    """Writes a PowerInfer model, by default two layers of Llama-2-7B's shape, and returns its path.

    Args:
        path: the file, overwritten.
        out_type: "q4_0" or "f16"; the output matrix is Q8_0 beside Q4_0.
        active: share of the neurons that the predictors keep for a token, at threshold 0.
        rank: of the predictors, more than 32.
        n_layers, d_model, d_ff, n_heads, vocab_size, context_length: of the model; widths are multiples of 32.
        seed: of the random numbers.
    """
    kind = GGMLQuantizationType[out_type.upper()]
    config = tiny_config(
        n_layers=n_layers, d_model=d_model, n_heads=n_heads, n_kv_heads=n_heads, d_ff=d_ff, vocab_size=vocab_size,
        context_length=context_length,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    embedding = rng.normal(0, 1, (vocab_size, d_model)).astype(np.float32)
    embedding[:, 0] = _LEVEL
    tensors = [NewTensor.from_values("token_embd.weight", embedding, kind)]
    for i in range(n_layers):
        tensors += _layer(config, i, kind, seed=seed + 1 + 100 * i)
        tensors += _predictor(embedding, i, kind, d_ff=d_ff, rank=rank, active=active, seed=seed + 50 + 100 * i)
    tensors.append(NewTensor.from_values("output_norm.weight", np.ones(d_model, np.float32), GGMLQuantizationType.F32))
    output = GGMLQuantizationType.Q8_0 if kind == GGMLQuantizationType.Q4_0 else kind
    tensors.append(NewTensor.from_values("output.weight", rng.normal(0, d_model**-0.5, (vocab_size, d_model)), output))
    return write_gguf(path, metadata_of(config, tokenizer="spm"), tensors, magic=POWERINFER_MAGIC)


def _layer(config: ModelConfig, i: int, kind: GGMLQuantizationType, *, seed: int) -> list[NewTensor]:
    """Attention and FFN add a tenth to a residual, so that the predictors see what they were planted for."""
    D, F = config.d_model, config.d_ff
    shapes = {name: (D, D) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {name: (F, D) for name in ("ffn_gate", "ffn_up", "ffn_down_t")}
    out = [
        NewTensor.from_values(f"blk.{i}.{n}.weight", np.ones(D), GGMLQuantizationType.F32)
        for n in ("attn_norm", "ffn_norm")
    ]
    for number, (name, (rows, cols)) in enumerate(shapes.items()):
        std = {"attn_output": 0.1 / math.sqrt(D), "ffn_down_t": 0.1 / math.sqrt(F)}.get(name, 1 / math.sqrt(D))

        def data(rows=rows, cols=cols, seed=seed + number, std=std, name=name):
            raw = random_quantised(kind, rows, cols, seed, std=std, edges=False)
            if name == "ffn_down_t" and kind == GGMLQuantizationType.Q4_0:
                raw = raw.reshape(rows, -1, 18)  # 4.6 is the deviation of the codes 0 .. 15
                raw[..., :2] = np.full(1, std / 4.6, np.float16).view(np.uint8)
            return raw

        out.append(NewTensor(f"blk.{i}.{name}.weight", kind, (rows, cols), data))
    return out


def _predictor(
    embedding: np.ndarray, i: int, kind: GGMLQuantizationType, *, d_ff: int, rank: int, active: float, seed: int
) -> list[NewTensor]:
    """fc1 and fc2: neuron j is kept where a random function of the residual exceeds the quantile of its frequency."""
    rng = np.random.default_rng(seed)
    vocab, width = embedding.shape
    fc1 = rng.normal(0, width**-0.5, (rank, width)).astype(np.float32)
    fc1[:, 0] = 0
    fc1[:_BIAS] = 0
    fc1[:_BIAS, 0] = 1 / _LEVEL  # these rows are 1 for every residual
    fc2 = rng.normal(0, rank**-0.5, (d_ff, rank)).astype(np.float32)
    fc2[:, :_BIAS] = 0
    stored = [quants.dequantize(quants.quantize(m, kind), kind) for m in (embedding, fc1, fc2)]
    scores = np.sort(np.maximum(stored[0] @ stored[1].T, 0) @ stored[2].T, axis=0)
    rest = np.clip(((1 - power_law(d_ff, active, seed=seed)) * vocab).astype(int), 0, vocab - 1)
    fc2[:, :_BIAS] = -scores[rest, np.arange(d_ff)][:, None] / _BIAS
    return [
        NewTensor.from_values(f"blk.{i}.fc1.weight", fc1, kind),
        NewTensor.from_values(f"blk.{i}.fc2.weight", fc2, kind),
    ]


def forwards(model: Model, repeats: int) -> list[tuple[int, float, float]]:
    """(rows, median seconds of a forward, union of their neurons as a share) for each of ROWS; new tokens each time."""
    width, capacity = model.config.d_ff, model.capacity_for(256)
    params = model.params_for(capacity)
    rng = np.random.default_rng(0)
    program = jax.jit(lambda params, tokens, cache: model.forward(params, tokens, cache, want=Want()), donate_argnums=2)
    cache = model.new_cache(1, capacity)

    def once(rows: int) -> tuple[float, float]:
        nonlocal cache
        tokens = jnp.asarray(rng.integers(3, model.config.vocab_size, (1, rows)), jnp.int32)
        cache = jax.block_until_ready(cache._replace(length=jnp.full((1,), 64, jnp.int32)))
        start = time.perf_counter()
        done, cache = jax.block_until_ready(program(params, tokens, cache))
        return time.perf_counter() - start, 1.0 if done.stats is None else float(np.mean(done.stats.union)) / width

    found = interleaved({rows: partial(once, rows) for rows in ROWS}, repeats=repeats)
    return [(rows, float(np.median(each, 0)[0]), float(np.mean(each, 0)[1])) for rows, each in found.items()]


def best_length(timed: Sequence[tuple[int, float, float]], acceptance: float) -> int:
    """The draft length of most tokens a second where each token is accepted with that probability; 1 at least.

    Args:
        timed: (rows, seconds of a forward, union) as `forwards` gives them.
        acceptance: of a token, from 0 to 1.
    """
    speeds = {rows - 1: expected_tokens(acceptance, rows - 1) / seconds for rows, seconds, _ in timed if rows > 1}
    return max(speeds, key=speeds.__getitem__)


def table(path: Path, repeats: int) -> int:
    """Prints milliseconds of passes of the dense and the sparse model, beside those of the latter's bytes.

    Returns:
        The draft length that pays best for the sparse model.
    """
    dense, sparse = (specsparse.load(path, ffn=ffn) for ffn in ("dense", "powerinfer"))
    bandwidth = machine.read_bandwidth()
    size = {name: t.nbytes for name, t in open_gguf(path).tensors.items() if name != "token_embd.weight"}
    ffns = sum(n for name, n in size.items() if name.split(".")[-2] in ("ffn_gate", "ffn_up", "ffn_down_t"))
    rest = sum(size.values()) - ffns
    print(f"{path.name}: FFNs {ffns / 1e6:.0f} MB, all else {rest / 1e6:.0f} MB; reads {bandwidth / 1e9:.1f} GB/s")
    print("rows  dense, ms  sparse, ms  union  by bytes, ms  sparse / by bytes")
    timed = forwards(sparse, repeats)
    for (rows, dense_s, _), (_, sparse_s, union) in zip(forwards(dense, repeats), timed):
        wall = (rest + union * ffns) / bandwidth
        times = f"{1e3 * dense_s:9.2f}  {1e3 * sparse_s:10.2f}  {union:5.1%}  {1e3 * wall:12.2f}"
        print(f"{rows:4d}  {times}  {sparse_s / wall:17.2f}")
    length = best_length(timed, _ACCEPTANCE)
    print(f"drafts of {length} pay best")
    return length


def main() -> int:
    parser = argparse.ArgumentParser(description="speculation and sparsity on planted layers of real shape")
    parser.add_argument("--folder", type=Path, required=True, help="where the model is kept")
    parser.add_argument("--type", choices=("q4_0", "f16"), default="f16")
    parser.add_argument("--active", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only-forwards", action="store_true")
    args, more = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"planted-7b-2-layers-{args.active:g}.{args.type}.powerinfer.gguf"
    if not path.is_file():
        write_planted_powerinfer(path, out_type=args.type, active=args.active)
    length = table(path, args.repeats)
    if args.only_forwards:
        return 0
    return run([
        "+experiment=spec_sparse", f"model={path}", "ffn=powerinfer", "predictor=none", "drafter=synthetic",
        "verifier=synthetic", f"policy.gamma={length}", "data.tasks=[chat]", "data.limit_per_task=4", "data.chat=false",
        "sampling.ignore_eos=true", *more,
    ])  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
