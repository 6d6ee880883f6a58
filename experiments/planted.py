"""Claim: on layers of Llama-2-7B's shape with 10 % of the neurons active, speculation and sparsity together are at
least 1.3 times as fast as the better of the two alone, and a pass of n rows takes the time of the bytes that it reads.

Writes a model with planted sparsity (two layers, F16 or Q4_0, predictors of rank 1024; 0.3 to 0.9 GB, kept), measures
forwards of n rows beside the union of their neurons, then runs `kind: spec_sparse` with synthetic acceptance 0.7.

Expected: both together >= 1.3; n rows within 10 % of (dense + union(n)) bytes / bandwidth while memory is the limit.
With q4_0 the dense model keeps its transposed down matrix in float32, since other blocks would change its values: the
dense times are too long by that, and only the two sparse ones may be compared.
Run time: four minutes for f16, two of them to write the model.
Command: python experiments/planted.py --folder planted --type f16
"""

import argparse
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specsparse
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.measure import machine
from specsparse.run import main as run
from specsparse.support.in_turn import in_turn
from specsparse.testing.planted import write_planted_powerinfer

ROWS = (1, 2, 4, 5, 8)


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

    found = in_turn({rows: partial(once, rows) for rows in ROWS}, repeats=repeats)
    return [(rows, float(np.median(each, 0)[0]), float(np.mean(each, 0)[1])) for rows, each in found.items()]


def table(path: Path, repeats: int) -> None:
    """Milliseconds of passes of the dense and of the sparse model, beside those that the bytes of the latter take."""
    dense, sparse = (specsparse.load(path, ffn=ffn) for ffn in ("dense", "powerinfer"))
    bandwidth = machine.read_bandwidth()
    size = {name: t.nbytes for name, t in open_gguf(path).tensors.items() if name != "token_embd.weight"}
    ffns = sum(n for name, n in size.items() if name.split(".")[-2] in ("ffn_gate", "ffn_up", "ffn_down_t"))
    rest = sum(size.values()) - ffns
    print(f"{path.name}: FFNs {ffns / 1e6:.0f} MB, all else {rest / 1e6:.0f} MB; reads {bandwidth / 1e9:.1f} GB/s")
    print("rows  dense, ms  sparse, ms  union  by bytes, ms  sparse / by bytes")
    for (rows, dense_s, _), (_, sparse_s, union) in zip(forwards(dense, repeats), forwards(sparse, repeats)):
        wall = (rest + union * ffns) / bandwidth
        times = f"{1e3 * dense_s:9.2f}  {1e3 * sparse_s:10.2f}  {union:5.1%}  {1e3 * wall:12.2f}"
        print(f"{rows:4d}  {times}  {sparse_s / wall:17.2f}")


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
    table(path, args.repeats)
    if args.only_forwards:
        return 0
    return run([
        "+experiment=spec_sparse", f"model={path}", "ffn=powerinfer", "predictor=none", "drafter=synthetic",
        "verifier=synthetic", "policy.gamma=4", "data.tasks=[chat]", "data.limit_per_task=4", "data.chat=false",
        "sampling.ignore_eos=true", *more,
    ])  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
