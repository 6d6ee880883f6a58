"""How the weights of a model are divided among devices, so that each computes whole heads and whole blocks.

Tensor parallelism of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the projections that widen (q, k,
v, gate, up) are cut along their rows, the ones that lead back (attention output, down) along their columns, embedding
and output along the vocabulary. Every device gets the same number of key/value heads with their query heads, of FFN
neurons and of tokens; what does not divide is filled up with zeros, which change nothing: a head of zeros attends to
values of zero, a neuron of zeros is multiplied by a column of zeros.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gguf import GGMLQuantizationType as GGML

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.errors import UserError
from specsparse.kernels.packing.pack import layout_of
from specsparse.kernels.qtensor import ROWS

BY_ROWS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "token_embd", "output")
"""Matrices of which each device holds some rows."""
BY_COLUMNS = ("attn_output", "ffn_down")
"""Matrices of which each device holds some columns: their products are added up over the devices."""


@dataclass(frozen=True)
class Split:
    """Sizes of a model over all devices, filled up to a multiple of their number.

    Attributes:
        ways: devices.
        kv_heads, d_ff, vocab_size: at least the model's own.
        heads_dim: elements of the queries of all heads.
        kv_dim: of all keys.
    """

    ways: int
    kv_heads: int
    d_ff: int
    vocab_size: int
    heads_dim: int
    kv_dim: int

    def rows(self, name: str) -> int | None:
        """Rows of a matrix of `BY_ROWS`, None for any other name."""
        return {
            "attn_q": self.heads_dim, "attn_k": self.kv_dim, "attn_v": self.kv_dim, "ffn_gate": self.d_ff,
            "ffn_up": self.d_ff, "token_embd": self.vocab_size, "output": self.vocab_size,
        }.get(name)  # fmt: skip

    def columns(self, name: str) -> int | None:
        """Columns of a matrix of `BY_COLUMNS`, None for any other name."""
        return {"attn_output": self.heads_dim, "ffn_down": self.d_ff}.get(name)


def split(f: GGUFFile, config: ModelConfig, ways: int, *, floats: bool) -> Split:
    """The split of a dense model among `ways` devices; `floats` says that its weights are kept as float32.

    A device holds whole groups of 16 rows, and of a matrix cut along its columns whole blocks (32 columns, 256 of a
    K-quant).

    Raises:
        UserError: a device would be left without a head or without a neuron; the line names the numbers that would do.
    """
    heads, neurons = _heads(f, config, floats), _neurons(f, config, floats)
    _check(ways, {"key/value heads": (config.n_kv_heads, heads), "neurons": (config.d_ff, neurons)})
    kv_heads = ways * heads(ways)
    per_group = config.n_heads // config.n_kv_heads * config.head_dim
    return Split(
        ways=ways,
        kv_heads=kv_heads,
        d_ff=ways * neurons(ways),
        vocab_size=ways * _up(-(-config.vocab_size // ways), ROWS),
        heads_dim=kv_heads * per_group,
        kv_dim=kv_heads * config.head_dim,
    )


Share = Callable[[int], int]
"""Number of devices -> what one of them holds."""


def _heads(f: GGUFFile, config: ModelConfig, floats: bool) -> Share:
    """Key/value heads of a device: their keys fill groups of 16 rows, their queries those and blocks of columns."""
    queries = config.n_heads // config.n_kv_heads * config.head_dim
    unit = math.lcm(ROWS, *_blocks(f, config, "attn_output", floats))
    step = math.lcm(ROWS // math.gcd(ROWS, config.head_dim), unit // math.gcd(unit, queries))
    return lambda ways: _up(-(-config.n_kv_heads // ways), step)


def _neurons(f: GGUFFile, config: ModelConfig, floats: bool) -> Share:
    """FFN neurons of a device."""
    unit = math.lcm(ROWS, *_blocks(f, config, "ffn_down", floats))
    return lambda ways: _up(-(-config.d_ff // ways), unit)


def _blocks(f: GGUFFile, config: ModelConfig, name: str, floats: bool) -> set[int]:
    """Columns of a block of the matrix `name`, over all layers."""
    if floats:
        return {1}
    return {layout_of(GGML(f.tensors[f"blk.{i}.{name}.weight"].type)).unit for i in range(config.n_layers)}


def _check(ways: int, parts: dict[str, tuple[int, Share]]) -> None:
    """Refuses a number of devices of which the last would get nothing. `parts` are counts and shares by name."""

    def idle(n: int) -> list[str]:
        return [name for name, (count, share) in parts.items() if (n - 1) * share(n) >= count]

    for name in idle(ways):
        count, share = parts[name]
        good = ", ".join(str(n) for n in range(1, ways) if not idle(n))
        raise UserError(
            f"mesh={ways}: the model's {count} {name} in shares of {share(ways)} leave a device without any; "
            f"numbers of devices that would do: {good}"
        )


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
