"""Matrix products, attention and the rest of a forward pass on packed weights."""

from specsparse.kernels.api import (
    BACKENDS,
    TILE_ROWS,
    Kernels,
    automatic_width,
    depends_on_rows,
    get,
    platform,
    promise,
    status,
)
from specsparse.kernels.gpu.fragments import Fragments
from specsparse.kernels.gpu.weights import Kept, Matrix, PlainMatrix, described, kept_as, on_card, take_rows
from specsparse.kernels.native.cpu import set_threads
from specsparse.kernels.neurons import (
    ChosenFfn,
    NeuronChoice,
    NeuronRows,
    SignRows,
    SkipWeights,
    SparseStats,
    pack_neurons,
    pack_signs,
    regroup_neurons,
    skip_weights,
    skippable,
    unpack_neurons,
)
from specsparse.kernels.qtensor import Layout, QTensor

__all__ = [
    "BACKENDS",
    "TILE_ROWS",
    "ChosenFfn",
    "Fragments",
    "Kept",
    "Kernels",
    "Layout",
    "Matrix",
    "NeuronChoice",
    "NeuronRows",
    "PlainMatrix",
    "QTensor",
    "SignRows",
    "SkipWeights",
    "SparseStats",
    "automatic_width",
    "depends_on_rows",
    "described",
    "get",
    "kept_as",
    "on_card",
    "pack_neurons",
    "pack_signs",
    "platform",
    "promise",
    "regroup_neurons",
    "set_threads",
    "skip_weights",
    "skippable",
    "status",
    "take_rows",
    "unpack_neurons",
]
