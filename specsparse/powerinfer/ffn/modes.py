"""Which FFN a model runs with: the choice of `specsparse.load(ffn=, threshold=, faithful_f16=)`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from specsparse.engine.config import ModelConfig
from specsparse.engine.devices import Devices, OneDevice
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.weights import PackFFN
from specsparse.errors import UserError
from specsparse.kernels import Kernels
from specsparse.powerinfer.ffn import faithful, zero_skip

MODES = ("dense", "powerinfer", "oracle")
"""All neurons; those the file's predictors keep; those whose activation is not zero (`zero_skip` where it can)."""
PREDICTED = "predicted"
"""Mode of a dense file whose FFN a predictor gates (`ffn.gated`), which no file asks for itself."""


@dataclass(frozen=True)
class LoadPlan:
    """How a model is packed and run.

    Attributes:
        mode: of `MODES`.
        rule: the threshold in force, and PowerInfer's roundings.
        kernels: what the whole model runs on.
        ffn: for `make_forward`; None is the dense one.
        pack: for `load_params`; None packs a dense file.
        floats: whether the weights are kept as float32.
        float_types: GGUF types that are so in any case.
        devices: where it lies.
    """

    mode: str
    rule: str
    kernels: Kernels
    ffn: Callable | None
    pack: PackFFN | None
    floats: bool
    float_types: tuple[str, ...]
    devices: Devices = field(default_factory=OneDevice)


def plan(
    f: GGUFFile,
    config: ModelConfig,
    kernels: Kernels,
    *,
    ffn: str | None = None,
    threshold: float | None = None,
    faithful_f16: bool = False,
) -> LoadPlan:
    """The plan for an open file; by default PowerInfer's for its files and dense for others.

    Raises:
        UserError: an unknown mode, one that the file has no predictors for, a threshold that nothing would read or that
            is no number, or a type of weights that `faithful_f16` does not know.
    """
    sparse = bool(config.predictor_ranks)
    mode = ffn or ("powerinfer" if sparse else "dense")
    if mode not in MODES:
        raise UserError(f"ffn={mode!r} does not exist; choose one of {', '.join(MODES)}")
    if mode == "powerinfer" and not sparse:
        raise UserError(f"{f.path}: has no predictors, so ffn='powerinfer' cannot run; use 'dense' or 'oracle'")
    if threshold is not None and mode != "powerinfer":
        raise UserError(f"threshold={threshold} does nothing with ffn={mode!r}; it belongs to ffn='powerinfer'")
    floats = kernels.name != "native"
    if faithful_f16:
        for t in f.tensors.values():
            faithful.check_type(t.type.name, f"{f.path}: tensor '{t.name}'")
        kernels = faithful.faithful(kernels)
    limit = 0.0
    if sparse:
        from specsparse.powerinfer.ffn.sparse_weights import threshold_of

        limit = threshold_of(f, threshold)
    if mode == "dense" and not sparse:
        run, pack = None, None
    elif mode == "oracle" and not floats and not faithful_f16 and zero_skip.in_file(f, config, kernels):
        run, pack = None, zero_skip.pack
    else:
        run, pack = _injected(config, kernels, mode, limit, floats=floats, faithful_f16=faithful_f16)
    return LoadPlan(
        mode=mode,
        rule=", ".join([f"threshold={limit:g}"] * (mode == "powerinfer") + ["faithful_f16"] * faithful_f16),
        kernels=kernels,
        ffn=run,
        pack=pack,
        floats=floats,
        float_types=faithful.FLOAT_TYPES if faithful_f16 else (),
    )


def _injected(
    config: ModelConfig, kernels: Kernels, mode: str, limit: float, *, floats: bool, faithful_f16: bool
) -> tuple[Callable | None, PackFFN | None]:
    """The FFN and the packer of its weights: neurons row by row, or dense and masked to round between the products."""
    # Only such a model waits until what computes neuron by neuron is imported.
    from specsparse.powerinfer.ffn import sparse_ffn
    from specsparse.powerinfer.ffn.sparse_weights import dense_packer, rows_packer
    from specsparse.predictors.base import FFN
    from specsparse.predictors.bounds import Oracle
    from specsparse.predictors.scored import Mlp

    predicted = mode == "powerinfer"
    pack = dense_packer(limit, floats=floats) if config.predictor_ranks else None
    if mode == "dense":
        return None, pack
    ffn = FFN.from_config(config, kernels)
    predictor = Mlp(ffn) if predicted else Oracle(ffn)
    if faithful_f16:
        keep = sparse_ffn.predicted(predictor) if predicted else sparse_ffn.true_activations
        return sparse_ffn.masked_ffn(config, kernels, keep), pack
    return sparse_ffn.make_ffn(config, kernels, predictor), rows_packer(limit, floats=floats, predictor=predicted)
