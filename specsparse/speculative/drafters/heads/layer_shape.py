"""The sizes of a head's layers, whatever kind of head it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """Static sizes.

    Attributes:
        width: D, of the head's rows.
        heads, kv_heads, head_dim: H, G, d of its attention.
        d_ff: F, neurons.
        eps: of every RMS norm.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    eps: float
