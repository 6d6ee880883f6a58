"""The oracle without its price: a ReLU model that does not read the neurons its gate closes, and keeps every bit.

The gate is read whole. If it is not above 0, up and down add nothing: the dense kernels sum each block of 32 neurons
as an exact whole number before scales come in, so that a sum without its zeros has the same bits (of finite weights).
This needs Q4_0 matrices whose blocks run along the neurons, as `+experiment=relufy` writes them; other models have the
oracle of `powerinfer.sparse_ffn`. Passes of several rows run the dense kernels, which read a weight once for all.
"""

from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Params, pack_matrix
from specsparse.kernels import Kernels, QTensor, SkipWeights, regroup_neurons, skippable, stripes

ACTIVATIONS = ("relu", "relu2")
_MATRICES = ("ffn_gate", "ffn_up", "ffn_down")


def _serves(config: ModelConfig, kernels: Kernels) -> bool:
    """Whether these kernels can skip zeros in a model of that config, if its matrices allow it."""
    biased = any(name.startswith("ffn_") for name in config.biases)
    one_call = kernels.layers is not None and config.head_dim % 16 == 0
    return one_call and config.gated and config.activation in ACTIVATIONS and not biased


def in_file(f: GGUFFile, config: ModelConfig, kernels: Kernels) -> bool:
    """Whether the zeros of this file's model can be skipped."""
    names = [f"blk.{i}.{name}.weight" for i in range(config.n_layers) for name in _MATRICES]
    return _serves(config, kernels) and all(n in f.tensors and f.tensors[n].type.name == "Q4_0" for n in names)


def in_params(params: Params, config: ModelConfig, kernels: Kernels) -> bool:
    """Whether the zeros of a dense model's parameters can be skipped."""
    matrices = [getattr(layer, name) for layer in params.layers for name in _MATRICES]
    return _serves(config, kernels) and all(m is not None and skippable(m) for m in matrices)


def skips(params: Params) -> bool:
    """Whether these parameters are such: the model's bits are those of the dense one."""
    return all(isinstance(layer.sparse, SkipWeights) for layer in params.layers)


def _skip_weights(up: QTensor, down: QTensor) -> SkipWeights:
    return SkipWeights(regroup_neurons(up), stripes(down))


def pack(own: dict[str, TensorInfo]) -> dict[str, Pytree]:
    """A `pack_ffn` for `engine.weights.load_params`: the dense matrices, and their rows by neuron."""
    gate, up, down = (pack_matrix(own[name], floats=False) for name in _MATRICES)
    return {"ffn_gate": gate, "ffn_up": up, "ffn_down": down, "sparse": _skip_weights(up, down)}


def skipping(params: Params) -> Params:
    """The parameters of `in_params`, with rows by neuron beside the matrices."""
    layers = (layer._replace(sparse=_skip_weights(layer.dense.up, layer.dense.down)) for layer in params.layers)
    return params._replace(layers=tuple(layers))
