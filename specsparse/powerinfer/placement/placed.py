"""A PowerInfer model with hot and cold neurons apart: the choice of `specsparse.load(placement=, hot=, devices=)`."""

import os
from collections.abc import Sequence

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.devices import OneDevice
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.errors import UserError
from specsparse.kernels import Kernels
from specsparse.powerinfer.ffn.modes import LoadPlan
from specsparse.powerinfer.ffn.sparse_weights import threshold_of
from specsparse.powerinfer.files.gpuidx import GpuIndex, read_gpuidx
from specsparse.powerinfer.placement.hot_cold import HOT, hot_cold_ffn, packer
from specsparse.powerinfer.placement.problem import Placement
from specsparse.powerinfer.placement.two_devices import GivenDevices, TwoDevices, two_devices

GivenPlacement = str | os.PathLike[str] | GpuIndex | Placement
"""A gpuidx file or its path, or what a rule found."""


def plan(
    f: GGUFFile,
    config: ModelConfig,
    kernels: Kernels,
    *,
    placement: GivenPlacement | None = None,
    hot: str = "masked",
    devices: GivenDevices = 1,
    ffn: str | None = None,
    threshold: float | None = None,
    faithful_f16: bool = False,
) -> LoadPlan:
    """The plan for an open file and a placement.

    Raises:
        UserError: options that do not go together, no PowerInfer file, or a placement of another model.
    """
    if hot not in HOT:
        raise UserError(f"hot={hot!r} does not exist; choose one of {', '.join(HOT)}")
    pair = isinstance(devices, Sequence) and not isinstance(devices, str) and len(devices) == 2
    named = pair and all(isinstance(device, str) for device in devices)
    if not named and (isinstance(devices, bool) or not isinstance(devices, int) or devices not in (1, 2)):
        raise UserError(f"devices={devices!r}: must be 1 or 2, or two names such as [cuda:0, cpu]")
    if placement is None:
        raise UserError(f"hot={hot} on {devices} device(s) needs a placement: give placement=FILE.gpuidx")
    if not config.predictor_ranks:
        raise UserError(
            f"{f.path}: has no predictors; `python -m specsparse convert powerinfer` joins a model with some"
        )
    if ffn not in (None, "powerinfer") or faithful_f16:
        given = "faithful_f16" if faithful_f16 else f"ffn={ffn!r}"
        raise UserError(f"{given} does not go with a placement, which runs ffn='powerinfer'")
    masks = masks_of(placement, config)
    floats = kernels.name != "native"
    whole = isinstance(placement, Placement)
    where = OneDevice()
    if devices != 1:
        where = TwoDevices(
            config, kernels, two_devices(devices),
            host_layers=placement.host_layers if whole else frozenset(),
            output_on_host=whole and placement.output_on_host,
        )  # fmt: skip
    limit = threshold_of(f, threshold)
    return LoadPlan(
        mode="powerinfer" if hot == "masked" else "powerinfer, hot=dense (lossy)",
        rule=f"threshold={limit:g}, {'one device' if devices == 1 else 'two devices'}",
        kernels=kernels,
        ffn=hot_cold_ffn(config, kernels),
        pack=packer(masks, limit, floats=floats, dense_hot=hot == "dense"),
        floats=floats,
        float_types=(),
        devices=where,
    )


def masks_of(placement: GivenPlacement, config: ModelConfig) -> Sequence[np.ndarray]:
    """L masks bool[F], true for hot neurons.

    Raises:
        UserError: something else than a file, a `GpuIndex` or a `Placement`, or one of another model.
    """
    where = "placement"
    if isinstance(placement, str | os.PathLike):
        where, placement = str(placement), read_gpuidx(placement)
    if not isinstance(placement, GpuIndex | Placement):
        raise UserError(f"a placement is a gpuidx file, a GpuIndex or a Placement, not {type(placement).__name__}")
    GpuIndex(tuple(placement.hot), 0).check(layers=config.n_layers, d_ff=config.d_ff, where=where)
    return placement.hot
