"""The FFN that a model runs with, and the place of its neurons, chosen by the options of `specsparse.load`."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specsparse.engine.config import ModelConfig
from specsparse.engine.devices import Devices, OneDevice
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.weights import PackFFN
from specsparse.errors import UserError, refuse
from specsparse.kernels import Kernels
from specsparse.powerinfer import faithful, zero_skip

if TYPE_CHECKING:
    from specsparse.powerinfer.placement import GpuIndex, Placement

    GivenPlacement = str | os.PathLike[str] | GpuIndex | Placement
    """The path of a gpuidx file, its content, or the answer of a rule."""

MODES = ("dense", "powerinfer", "oracle")
"""All neurons; those the file's predictors keep; those whose activation is not zero (by `zero_skip` if it can)."""
PREDICTED = "predicted"
"""Mode of a dense file whose FFN a predictor gates (`fewer.gated`), which no file asks for itself."""
HOT = ("masked", "dense")
"""Predicted hot neurons are computed, as PowerInfer does, or all of them: other logits, and no prediction for them."""
GivenDevices = int | Sequence[str]
"""How many devices: 1 or 2; or two by name, as ("cuda:0", "cpu"): of attention and hot neurons, of cold ones."""
THRESHOLD_KEY = "powerinfer.sparse_threshold"
THRESHOLD_ENV = "LLAMA_SPARSE_PRED_THRESHOLD"


@dataclass(frozen=True)
class LoadPlan:
    mode: str  # of `MODES`
    rule: str  # the threshold in force, and PowerInfer's roundings
    kernels: Kernels
    ffn: Callable | None  # for `make_forward`; None is the dense one
    pack: PackFFN | None  # for `load_params`; None packs a dense file
    floats: bool  # the weights are kept as float32; those of the GGUF types `float_types` are so in any case
    float_types: tuple[str, ...] = ()
    devices: Devices = field(default_factory=OneDevice)


def plan(
    f: GGUFFile, config: ModelConfig, kernels: Kernels, *, ffn: str | None = None, threshold: float | None = None,
    faithful_f16: bool = False, placement: "GivenPlacement | None" = None, hot: str = "masked",
    devices: GivenDevices = 1,
) -> LoadPlan:  # fmt: skip
    """The plan for an open file; by default PowerInfer's for its files and dense for others. UserError: options that do
    not exist or do not go together, a mode that the file has no predictors for, a threshold that nothing would read or
    that is no number, a type of weights that `faithful_f16` does not know, or a placement of another model."""
    sparse = bool(config.predictor_ranks)
    placed = placement is not None or hot != "masked" or devices != 1
    mode = ffn or ("powerinfer" if sparse or placed else "dense")
    pair = isinstance(devices, Sequence) and not isinstance(devices, str) and len(devices) == 2
    named = pair and all(isinstance(device, str) for device in devices)
    rounding = "faithful_f16" if faithful_f16 else f"ffn={ffn!r}"
    experts = config.n_experts > 0
    refuse({
        "a placement is for dense models: experts have expected times only (+experiment=placement)":
            placed and experts,
        f"hot={hot!r} does not exist; choose one of {', '.join(HOT)}": hot not in HOT,
        f"ffn={mode!r} does not exist; choose one of {', '.join(MODES)}": mode not in MODES,
        f"devices={devices!r}: must be 1 or 2, or two names such as [cuda:0, cpu]":
            not named and not (type(devices) is int and devices in (1, 2)),
        f"{f.path}: has no predictors, so ffn='powerinfer' cannot run; use 'dense' or 'oracle', or join it with some "
        "by `python -m specsparse convert powerinfer`": mode == "powerinfer" and not sparse,
        f"ffn={mode!r} is for dense models; the FFN of this {config.architecture} is experts":
            experts and mode not in ("dense", "oracle"),
        "ffn='oracle' of experts is for ReLU, matrices in Q4_0 and native kernels":
            experts and mode == "oracle" and not zero_skip.in_file(f, config, kernels),
        "faithful_f16 is for PowerInfer's models; this one has experts": faithful_f16 and experts,
        f"threshold={threshold} does nothing with ffn={mode!r}; it belongs to ffn='powerinfer'":
            threshold is not None and mode != "powerinfer",
        f"{rounding} does not go with a placement, which runs ffn='powerinfer'":
            placed and (mode != "powerinfer" or faithful_f16),
        f"hot={hot} on {devices} device(s) needs a placement: give placement=FILE.gpuidx": placed and placement is None,
    })  # fmt: skip
    limit = threshold_of(f, threshold) if sparse else 0.0
    floats = kernels.name != "native"
    if placed:
        from specsparse.powerinfer import hot_cold
        from specsparse.powerinfer.placement import GpuIndex, Placement, read_gpuidx

        source = "placement"
        if isinstance(placement, str | os.PathLike):
            source, placement = str(placement), read_gpuidx(placement)
        if not isinstance(placement, GpuIndex | Placement):
            raise UserError(f"a placement is a gpuidx file, a GpuIndex or a Placement, not {type(placement).__name__}")
        GpuIndex(tuple(placement.hot), 0).check(layers=config.n_layers, d_ff=config.d_ff, where=source)
        host: dict[str, Any] = {}
        if isinstance(placement, Placement):  # layers or the output may lie on the host
            host = {"host_layers": placement.host_layers, "output_on_host": placement.output_on_host}
        return LoadPlan(
            mode="powerinfer" if hot == "masked" else "powerinfer, hot=dense (lossy)",
            rule=f"threshold={limit:g}, {'one device' if devices == 1 else 'two devices'}",
            kernels=kernels,
            ffn=hot_cold.hot_cold_ffn(config, kernels),
            pack=hot_cold.packer(placement.hot, limit, floats=floats, dense_hot=hot == "dense"),
            floats=floats,
            devices=OneDevice()
            if devices == 1
            else hot_cold.TwoDevices(config, kernels, hot_cold.two_devices(devices), **host),
        )
    if faithful_f16:
        faithful.check_types(f)
        kernels = faithful.faithful(kernels)
    run, pack = None, None
    if mode == "oracle" and not floats and not faithful_f16 and zero_skip.in_file(f, config, kernels):
        pack = zero_skip.pack
    elif mode != "dense" or sparse:
        # Imported here, so that a dense model does not wait for it.
        from specsparse.powerinfer import sparse_ffn
        from specsparse.predictors.base import FFN
        from specsparse.predictors.rules import Oracle
        from specsparse.predictors.scored import Mlp

        predicted = mode == "powerinfer"
        pack = sparse_ffn.dense_packer(limit, floats=floats) if sparse else None
        if mode != "dense":
            judged = FFN.from_config(config, kernels)
            if faithful_f16:  # dense and masked, to round between the products
                run = sparse_ffn.masked_ffn(config, kernels, Mlp(judged) if predicted else None)
            else:
                run = sparse_ffn.make_ffn(config, kernels, Mlp(judged) if predicted else Oracle(judged))
                pack = sparse_ffn.rows_packer(limit, floats=floats, predictor=predicted)
    return LoadPlan(
        mode=mode,
        rule=", ".join([f"threshold={limit:g}"] * (mode == "powerinfer") + ["faithful_f16"] * faithful_f16),
        kernels=kernels,
        ffn=run,
        pack=pack,
        floats=floats,
        float_types=faithful.FLOAT_TYPES if faithful_f16 else (),
    )


def threshold_of(f: GGUFFile, given: float | None = None) -> float:
    """The threshold in force: `given`, else the environment's, else the file's, else 0, as in PowerInfer. UserError:
    one that is no number, or NaN; infinities are fine (all neurons, or none)."""
    if given is not None:
        return number(given, "threshold")
    if (text := os.environ.get(THRESHOLD_ENV)) is not None:
        return number(text, THRESHOLD_ENV)
    return number(f.get(THRESHOLD_KEY, "float", 0.0), f"{f.path}: metadata key '{THRESHOLD_KEY}'")


def number(value: Any, what: str) -> float:
    """A threshold as a float, or a UserError that begins with `what` if it is no number or NaN."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        raise UserError(f"{what} is {value!r:.40}; a number is needed, such as 0")
    return found
