"""A model file as a placement problem: bytes of its parts, in the order in which PowerInfer fills the accelerator."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.powerinfer.placement.problem import GRANULARITY, Hardware, Problem

_NEURONS = ("ffn_gate", "ffn_up", "ffn_down", "ffn_down_t")
_PREDICTOR = ("fc1", "fc2")
_KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32}


@dataclass(frozen=True)
class ModelParts:
    """Bytes of a model's parts, L of each but the last two.

    Attributes:
        attention: with its norm and biases.
        predictors: 0 where the file has none.
        norms: of the FFN.
        neurons: of all neurons' rows.
        output: matrix and norm; the embedding itself where the two are tied.
        cache: keys and values of one layer.
    """

    attention: tuple[int, ...]
    predictors: tuple[int, ...]
    norms: tuple[int, ...]
    neurons: tuple[int, ...]
    output: int
    cache: int

    @staticmethod
    def of(f: GGUFFile, config: ModelConfig, *, context: int, kv_dtype: str = "f16") -> "ModelParts":
        """Of an open file, with a cache of `context` positions."""

        def of_layer(i: int, wanted) -> int:
            own = (t for n, t in f.tensors.items() if n.startswith(f"blk.{i}."))
            return sum(t.nbytes for t in own if wanted(t.name.split(".")[2]))

        def each(wanted) -> tuple[int, ...]:
            return tuple(of_layer(i, wanted) for i in range(config.n_layers))

        tied = "output.weight" not in f.tensors
        output = ("output_norm.weight", "token_embd.weight" if tied else "output.weight")
        return ModelParts(
            attention=each(lambda n: n.startswith("attn")),
            predictors=each(_PREDICTOR.__contains__),
            norms=each("ffn_norm".__eq__),
            neurons=each(_NEURONS.__contains__),
            output=sum(f.tensors[n].nbytes for n in output if n in f.tensors),
            cache=int(2 * config.n_kv_heads * config.head_dim * context * _KV_BYTES[kv_dtype]),
        )

    def in_order(self) -> dict[str, int]:
        """Bytes of the whole model by part, in the order of PowerInfer's offload."""
        return {
            "attention": sum(self.attention),
            "predictors": sum(self.predictors),
            "FFN norms": sum(self.norms),
            "output": self.output,
            "cache": self.cache * len(self.attention),
            "neurons": sum(self.neurons),
        }


def problem_of(
    parts: ModelParts,
    config: ModelConfig,
    read: Sequence[np.ndarray],
    *,
    budget: int,
    hardware: Hardware,
    granularity: int = GRANULARITY,
    dense_hot: bool = False,
    rows: int = 1,
) -> Problem:
    """The problem for a budget in bytes and forward passes of `rows` tokens; `read` is of `profiler.probabilities`."""
    width, d_ff = config.d_model, config.d_ff
    return Problem(
        read=tuple(read),
        neuron_bytes=tuple(-(-n // d_ff) for n in parts.neurons),
        dense_bytes=tuple(map(sum, zip(parts.attention, parts.predictors, parts.norms, strict=True))),
        cache_bytes=parts.cache,
        output_bytes=parts.output,
        exchange_bytes=rows * (2 * 4 * width + d_ff),
        border_bytes=rows * 4 * width,
        width=width,
        budget=budget,
        hardware=hardware,
        matrices=3 if config.gated else 2,
        granularity=granularity,
        dense_hot=dense_hot,
    )
