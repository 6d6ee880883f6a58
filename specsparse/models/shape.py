"""The shape of a model that need not be here: what its GGUF file would say, without jax and without the file."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specsparse.support.options import Count, Size

Mixed = Literal["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M"]
"""How llama.cpp calls the types of a file's weights together."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and the types of its file, as its config.json and the name of the file have them.

    Attributes:
        architecture: a name of `engine.architectures.ARCHITECTURES`.
        layers, width, heads, ff, vocab, context: L, D, H, F, V of docs/notation.md, and positions.
        kv_heads: G; None: as many as heads.
        head_dim: d; None: width / heads.
        tied: the output matrix is the embedding.
        window: tokens that a layer with a window sees.
        weights: types of the file.
    """

    architecture: str
    layers: Count
    width: Count
    heads: Count
    ff: Count
    vocab: Count
    context: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    tied: bool = False
    window: Size = 0
    weights: Mixed = "Q4_K_M"

    def type_of(self, name: str, columns: int) -> str:
        """GGUF type of a matrix with rows so long, by the rules of llama.cpp's quantiser (src/llama-quant.cpp).

        The output matrix has six bits beside four; of Q4_K_M so have the values and the down matrices of every third
        layer in the middle and of all at both ends. Rows that are no multiple of 256 cannot be K-quantised.
        """
        if self.weights in ("F16", "BF16", "Q8_0"):
            return self.weights
        output = name == "output.weight" or (self.tied and name == "token_embd.weight")
        more = output or (self.weights == "Q4_K_M" and name in self._better)
        kind = "Q6_K" if more else self.weights.removesuffix("_M")
        return {"Q6_K": "Q8_0", "Q4_K": "Q5_0"}.get(kind, kind) if columns % 256 else kind

    @property
    def _better(self) -> frozenset[str]:
        eighth = self.layers // 8
        chosen = (
            i for i in range(self.layers) if i < eighth or i >= 7 * self.layers // 8 or (i - eighth) % 3 == 2
        )  # fmt: skip
        return frozenset(f"blk.{i}.{name}.weight" for i in chosen for name in ("attn_v", "ffn_down"))

    def typed(self, shapes: Iterator[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, GGUF type, shape) of tensors given by name and shape (numpy order); vectors are F32."""
        for name, shape in shapes:
            yield name, self.type_of(name, shape[-1]) if len(shape) == 2 else "F32", shape
