"""Matrix products, attention and the rest of a forward pass on packed weights: one set of functions per backend, chosen
by name and injected into the model."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax

from specsparse.errors import UserError
from specsparse.kernels.experts import Experts, skipping
from specsparse.kernels.gpu import ops
from specsparse.kernels.gpu.fragments import Fragments
from specsparse.kernels.gpu.weights import Kept, Matrix, PlainMatrix, described, kept_as, on_card, take_rows
from specsparse.kernels.native import cpu, layers
from specsparse.kernels.native.cpu import set_threads
from specsparse.kernels.neurons import (
    ChosenFfn,
    NeuronChoice,
    NeuronRows,
    SignRows,
    SkipWeights,
    SparseStats,
    neuron_blocks,
    pack_neurons,
    pack_signs,
    regroup_neurons,
    skippable,
    unpack_neurons,
)
from specsparse.kernels.packing import dequant
from specsparse.kernels.qtensor import Layout, QTensor
from specsparse.kernels.reference import dense, experts, sparse

__all__ = [
    "BACKENDS", "TILE_ROWS", "ChosenFfn", "Experts", "Fragments", "Kept", "Kernels", "Layout", "Matrix", "NeuronChoice",
    "NeuronRows", "PlainMatrix", "QTensor", "SignRows", "SkipWeights", "SparseStats", "automatic_width",
    "depends_on_rows", "described", "get", "kept_as", "neuron_blocks", "on_card", "pack_neurons", "pack_signs",
    "platform", "promise", "regroup_neurons", "set_threads", "skippable", "skipping", "status", "take_rows",
    "unpack_neurons",
]  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """The functions of a forward pass. All take and return float32 rows; see `reference` for the definitions."""

    name: str  # "native", "reference", "xla", "packed" or "bf16"
    linear: Callable  # matrices times rows, with normalisation before and residual after
    add_normed: Callable  # rows plus normalised rows
    embed: Callable  # rows of a matrix by ids; see `packing.dequant.embed_rows`
    attend: Callable  # rotary embedding, cache append and attention
    argmax: Callable  # the lowest index of the largest value of each row
    sparse_ffn: Callable  # an FFN in which each row computes only its own neurons; see `reference.sparse`
    signbit_keep: Callable  # neurons predicted from sign bits
    # all layers of a dense model in one call, equal to their composition from `linear` and `attend` bit for bit. It
    # skips the zeros of a ReLU model if it is given `SkipWeights`, computes `sparse_ffn` if it is given `ChosenFfn`,
    # and keeps the rows that enter chosen layers. None if the backend has no such call
    layers: Callable | None = None
    normalise: Callable = dense.normalise
    choose: Callable = experts.choose  # the experts of each row by its router's logits; see `reference.experts`
    experts: Callable = experts.experts  # the sum of each row's experts; see `reference.experts`
    exact: bool = True  # whether a row's bits do not depend on the number of rows (contract C1)
    # how dense models keep their matrices for these kernels (`gpu.weights.on_card`); None: as `QTensor`
    kept: Kept | None = None


NATIVE = Kernels(
    "native", cpu.linear, cpu.add_normed, cpu.embed, cpu.attend, cpu.argmax,
    layers.sparse_ffn, layers.signbit_keep, layers.layers, choose=cpu.choose, experts=cpu.experts,
)  # fmt: skip
REFERENCE = Kernels(
    "reference", dense.linear, dense.add_normed, dequant.embed_rows, dense.attend, dense.argmax,
    sparse.sparse_ffn, sparse.signbit_keep,
)  # fmt: skip
XLA = Kernels(
    "xla", ops.linear, partial(dense.add_normed, over_rows=dense.at_once), ops.embed, dense.attend_batched,
    dense.argmax, partial(sparse.sparse_ffn, over_rows=dense.at_once), sparse.signbit_keep,
    normalise=partial(dense.normalise, over_rows=dense.at_once),
    choose=partial(experts.choose, over_rows=dense.at_once), exact=False,
)  # fmt: skip
"""Fast on a GPU, but its bits depend on the number of rows: the contract C1 does not hold."""
PACKED = replace(XLA, name="packed", attend=ops.attend, kept="packed")
"""XLA's, but products read weights as they are packed, on a GPU by a kernel of its own, and caches hold finite numbers
only."""
BF16 = replace(PACKED, name="bf16", kept="bf16")
"""XLA's on weights of two bytes: quantised ones are widened to bfloat16."""

BACKENDS = {k.name: k for k in (NATIVE, REFERENCE, XLA)}
"""Implementations of all functions."""
_NAMED = {**BACKENDS, PACKED.name: PACKED, BF16.name: BF16}

TILE_ROWS = 8
"""Rows of a tile of matrix units: widths of steps are multiples of it."""


def platform() -> str:
    """The kind of device that JAX computes on: "cpu", "gpu" or "tpu". UserError: JAX_PLATFORMS names one that is not
    here."""
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # the latter if JAX has no plugin for it
        given = os.environ.get("JAX_PLATFORMS") or jax.config.values["jax_platforms"]
        if not given:
            raise
        raise UserError(f"JAX_PLATFORMS={given}: JAX finds no such device here; leave it out, or set cpu") from error


def get(name: str | None = None) -> Kernels:
    """The kernels called `name`, by default native on a CPU that has them, else reference; packed on a GPU, and bf16 on
    other devices.

    `specsparse.load` chooses bf16 on a GPU too if a model fits so. `SPECSPARSE_KERNELS` overrides the default. Raises
    UserError for an unknown name, for native kernels that are missing if they are named or
    `SPECSPARSE_REQUIRE_NATIVE=1`, and as `platform`.
    """
    device, name = platform(), name or os.environ.get("SPECSPARSE_KERNELS")
    if name is None:
        if device != "cpu":
            return PACKED if device == "gpu" else BF16
        name = "native" if cpu.available() else "reference"
    if name not in _NAMED:
        raise UserError(f"kernels {name!r} do not exist; there are {', '.join(_NAMED)}")
    if name == "native" or os.environ.get("SPECSPARSE_REQUIRE_NATIVE") == "1":
        cpu.needed()
    return _NAMED[name]


def depends_on_rows(name: str) -> bool:
    """Whether a row's bits depend on the number of rows computed beside it, so that a width makes sense."""
    return name in _NAMED and not _NAMED[name].exact


def automatic_width(name: str) -> int:
    """Default width of the steps of a dense model on one device: `TILE_ROWS` if bits depend on it, that is for xla,
    packed and bf16 kernels on an accelerator; else 0, for no fixed width."""
    return TILE_ROWS if depends_on_rows(name) and jax.default_backend() != "cpu" else 0


def promise(name: str, width: int = 0, *, why: str = "") -> str:
    """The equality of speculative and plain text that the kernels called `name` give with steps of `width` rows
    (`engine.fixed_width`), and why; `why` is the reason for the width."""
    if not depends_on_rows(name):
        return "equal bits: a row depends on its own path alone, whatever is computed beside it (contract C1)"
    if width:
        because = f" ({why})" if why else ""
        return f"equal bits, as far as tested on this device: every step runs {width} rows through one program{because}"
    return (
        "equal distribution: bits depend on the number of rows, so near ties may go another way; width= holds it fixed"
    )


def status() -> dict:
    """The default kernels and the reasons for them, for records and the terminal; `promise` is for dense models."""
    chosen = get().name
    width = automatic_width(chosen)
    return {
        "kernels": chosen,
        "promise": promise(chosen, width, why="more where a draft needs them" if width else ""),
        "native": cpu.available(),
        "why_not_native": cpu.why_missing(),
        "isa": cpu.isa(),
        "why_not_amx": cpu.why_no_amx(),
        "threads": cpu.threads(),
        "device": jax.default_backend(),
    }
