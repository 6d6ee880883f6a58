"""Claim: files of real shapes with random weights are enough to measure loading, memory, tok/s and v(n).

Writes models of three shapes: Llama-2-7B in Q4_0 (3.8 GB, output matrix Q6_K as in the files people have), llama-160m
in F16 (0.32 GB), and SmallThinker-4B-A0.6B in Q4_0 (2.3 GB, 32 experts, 4 of a token). They have random codes under
sane scales, made tensor by tensor, and a SentencePiece vocabulary. The text they write means nothing, and a random
router's choice is not a text's: deep layers add much that is alike in all rows, so rows share more than half of their
experts. --alike plants the part that they share.

Expected: a few hundred MB of memory at most.
Run time: half a minute for the 7B file.
Command: python experiments/make_shapes.py --folder shapes                 all files
         python experiments/make_shapes.py --folder shapes --only smallthinker-4b
         python experiments/make_shapes.py --folder shapes --scale 16      1/16 of every width and depth, for tests
"""

import argparse
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGML

from specsparse.engine.config import ROUTER, ModelConfig
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.testing import random_quantised, tiny_config
from specsparse.testing.tiny import metadata_of

CHUNK = 1 << 24
"""Weights made at a time."""


@dataclass(frozen=True)
class Shape:
    """A model to write.

    Attributes:
        name: of the file.
        kind: GGUF type of the matrices.
        output: type of the output matrix.
        layers, width, heads, ff, context: the model's; with experts, ff is the width of one.
        norm_eps: of its norms.
        architecture, rope_base, kv_heads, head_dim, tied, experts, chosen: if they are not those of a plain Llama.
    """

    name: str
    kind: str
    output: str
    layers: int
    width: int
    heads: int
    ff: int
    context: int
    norm_eps: float
    vocab: int = 32000
    architecture: str = "llama"
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    rope_base: float = 10000.0

    def scaled(self, scale: int) -> "Shape":
        """The shape at 1/scale of each dimension; widths are multiples of 256, as every block needs, heads 64 wide."""
        if scale == 1:
            return self

        def at_most(value: int, step: int) -> int:
            return max(step, value // scale // step * step)

        width = at_most(self.width, 256)
        return replace(
            self,
            layers=max(2, self.layers // scale),
            width=width,
            heads=width // 64,
            kv_heads=None,
            head_dim=None,
            ff=at_most(self.ff, 256),
            context=max(512, self.context // scale),
            vocab=max(512, self.vocab // scale),
        )

    def config(self) -> ModelConfig:
        """As the engine will read it."""
        return tiny_config(
            architecture=self.architecture, n_layers=self.layers, d_model=self.width, n_heads=self.heads,
            n_kv_heads=self.kv_heads or self.heads, head_dim=self.head_dim, d_ff=self.ff, vocab_size=self.vocab,
            context_length=self.context, norm_eps=self.norm_eps, tied=self.tied, n_experts=self.experts,
            n_chosen=self.chosen, gating="sigmoid" if self.experts else "softmax", rope_base=self.rope_base,
        )  # fmt: skip


SHAPES = {
    "7b": Shape("llama-2-7b-shape", "Q4_0", "Q6_K", 32, 4096, 32, 11008, 4096, 1e-5),
    "160m": Shape("llama-160m-shape", "F16", "F16", 12, 768, 12, 3072, 2048, 1e-6),
    "smallthinker-4b": Shape(
        "smallthinker-4b-a0.6b-shape", "Q4_0", "Q4_0", 32, 1536, 12, 768, 32768, 1e-6,
        vocab=151936,
        architecture="smallthinker",
        rope_base=1.5e6,
        kv_heads=2,
        head_dim=128,
        tied=True,
        experts=32,
        chosen=4,
    ),
}


def write(shape: Shape, path: Path, *, seed: int = 0, alike: float | None = None) -> int:
    """Writes the model and returns its bytes; the file appears when it is complete.

    With `alike`, that part of each embedding is the same for all tokens, in whole blocks, and the norms of layers are
    so small that these add next to nothing: so routers see embeddings alone. Of 4 experts of 32, rows then share 13 %
    (0), 26 % (0.33) or 38 % (0.56).
    """
    config, tensors = shape.config(), []
    for index, (name, dims) in enumerate(config.tensor_shapes()):
        matrix = shape.output if name == "output.weight" else shape.kind
        kind = GGML["F32" if len(dims) == 1 or f".{ROUTER}." in name else matrix]
        common = alike if alike and name == "token_embd.weight" else 0.0
        norm = 1.0 if alike is None or not name.startswith("blk.") else 1e-3
        values = partial(_values, dims, kind, seed=seed * 100_003 + index, norm=norm, alike=common)
        tensors.append(NewTensor(name, kind, dims, values))
    keys = metadata_of(config) | {"general.name": f"{shape.name} (random weights)"}
    return write_gguf(path, keys, tensors).stat().st_size


def _values(dims: tuple[int, ...], kind: GGML, *, seed: int, norm: float, alike: float) -> np.ndarray:
    """Rows of deviation 1/sqrt(inputs), so that activations stay near one where norms are one."""
    if len(dims) == 1:
        return np.full(dims, norm, np.float32)
    rows, cols = math.prod(dims[:-1]), dims[-1]
    each = max(1, CHUNK // cols)
    flat = np.concatenate([
        random_quantised(
            kind, min(each, rows - start), cols, seed * 1009 + start, std=1 / math.sqrt(cols), edges=False
        )
        for start in range(0, rows, each)
    ])  # fmt: skip
    blocks = cols // GGML_QUANT_SIZES[kind][0]
    common = flat.shape[1] // blocks * round(alike * blocks)
    flat[:, :common] = flat[0, :common]
    return flat.reshape(*dims[:-1], -1)


def main() -> int:
    parser = argparse.ArgumentParser(description="write GGUF files of real shapes with random weights")
    parser.add_argument("--folder", type=Path, required=True, help="where to; made if it is not there")
    parser.add_argument("--only", choices=SHAPES, help="one of them")
    parser.add_argument("--scale", type=int, default=1, help="1/scale of every dimension, for tests (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alike", type=float, help="part of each embedding that all tokens share; plants routing")
    args = parser.parse_args()
    if args.scale < 1:
        parser.error("--scale must be at least 1")
    if not 0 <= (args.alike or 0) <= 1:
        parser.error("--alike must lie in 0..1")
    args.folder.mkdir(parents=True, exist_ok=True)
    for key, shape in SHAPES.items():
        if args.only in (None, key):
            small = shape.scaled(args.scale)
            path = args.folder / f"{small.name}-{small.kind}.gguf"
            start = time.perf_counter()
            size = write(small, path, seed=args.seed, alike=args.alike)
            print(f"{path}: {size / 1e9:.3f} GB in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
