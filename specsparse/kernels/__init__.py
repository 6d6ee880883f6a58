"""Matrix products, attention and the rest of a forward pass on packed weights."""

from specsparse.kernels.api import BACKENDS, TILE_ROWS, Kernels, automatic_width, get, promise, status
from specsparse.kernels.native.cpu import set_threads
from specsparse.kernels.neurons import (
    ChosenFfn,
    NeuronChoice,
    NeuronRows,
    SparseStats,
    pack_neurons,
    regroup_neurons,
    take_neurons,
    unpack_neurons,
)
from specsparse.kernels.packing.signbits import SignRows, pack_signs
from specsparse.kernels.packing.stripes import SkipWeights, skip_weights, skippable
from specsparse.kernels.qtensor import Layout, QTensor

__all__ = [
    "BACKENDS",
    "TILE_ROWS",
    "ChosenFfn",
    "Kernels",
    "Layout",
    "NeuronChoice",
    "NeuronRows",
    "QTensor",
    "SignRows",
    "SkipWeights",
    "SparseStats",
    "automatic_width",
    "get",
    "pack_neurons",
    "pack_signs",
    "promise",
    "regroup_neurons",
    "set_threads",
    "skip_weights",
    "skippable",
    "status",
    "take_neurons",
    "unpack_neurons",
]
