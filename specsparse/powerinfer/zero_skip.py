"""The oracle without its price: a ReLU model that does not read the neurons its gate closes, and keeps every bit.

The gate is read whole. If it is not above 0, up and down add nothing: the dense kernels sum each block of 32 neurons
as an exact whole number before scales come in, so that a sum without its zeros has the same bits (of finite weights).
This needs Q4_0 matrices whose blocks run along the neurons, as `+experiment=relufy` writes them; other models have the
oracle of `powerinfer.sparse_ffn`. Passes of several rows run the dense kernels, which read a weight once for all.
Inside ReLU experts it is the same, for the experts that a single row chose.
"""

from specsparse.engine.config import EXPERTS, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, TensorInfo
from specsparse.engine.pytree import Pytree
from specsparse.engine.weights import Params, pack_matrix
from specsparse.kernels import Experts, Kernels, QTensor, SkipWeights, neuron_blocks, regroup_neurons, skippable
from specsparse.kernels import skipping as experts_skipping

ACTIVATIONS = ("relu", "relu2")
_MATRICES = ("ffn_gate", "ffn_up", "ffn_down")


def _serves(config: ModelConfig, kernels: Kernels) -> bool:
    """Whether these kernels can skip zeros in a model of that config, if its matrices allow it."""
    biased = any(name.startswith("ffn_") for name in config.biases)
    if config.n_experts:
        return kernels.name == "native" and config.activation == "relu" and not biased
    one_call = kernels.layers is not None and config.head_dim % 16 == 0
    return one_call and config.gated and config.activation in ACTIVATIONS and not biased


def in_file(f: GGUFFile, config: ModelConfig, kernels: Kernels) -> bool:
    """Whether the zeros of this file's model can be skipped."""
    matrices = EXPERTS if config.n_experts else _MATRICES
    names = [f"blk.{i}.{name}.weight" for i in range(config.n_layers) for name in matrices]
    return _serves(config, kernels) and all(n in f.tensors and f.tensors[n].type.name == "Q4_0" for n in names)


def in_params(params: Params, config: ModelConfig, kernels: Kernels) -> bool:
    """Whether the zeros of a dense model's parameters can be skipped."""
    matrices = [getattr(layer, name) for layer in params.layers for name in _MATRICES]
    return _serves(config, kernels) and all(m is not None and skippable(m) for m in matrices)


def skips(params: Params) -> bool:
    """Whether these parameters are such: the model's bits are those of the dense one."""
    found = (layer.sparse if layer.experts is None else layer.experts.skip for layer in params.layers)
    return all(isinstance(weights, SkipWeights) for weights in found)


def _skip_weights(up: QTensor, down: QTensor) -> SkipWeights:
    return SkipWeights(regroup_neurons(up), neuron_blocks(down))


def pack(own: dict[str, TensorInfo]) -> dict[str, Pytree]:
    """A `pack_ffn` for `engine.weights.load_params`: the dense matrices, and their rows by neuron."""
    matrices = EXPERTS if EXPERTS[0] in own else _MATRICES
    gate, up, down = (pack_matrix(own[name], floats=False) for name in matrices)
    if matrices is EXPERTS:
        return {"experts": experts_skipping(Experts(gate, up, down, "relu"))}
    return {"ffn_gate": gate, "ffn_up": up, "ffn_down": down, "sparse": _skip_weights(up, down)}


def skipping(params: Params) -> Params:
    """The parameters of `in_params`, with rows by neuron beside the matrices."""
    layers = (layer._replace(sparse=_skip_weights(layer.dense.up, layer.dense.down)) for layer in params.layers)
    return params._replace(layers=tuple(layers))
