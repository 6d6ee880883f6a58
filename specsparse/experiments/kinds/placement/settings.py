"""The `placement` group of a config, and what goes with it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from specsparse.experiments.settings import ModelSettings
from specsparse.support.options import Count, Positive, Range, Share, Size


@dataclass(frozen=True)
class PlacementSpec:
    """Which neurons lie on the accelerator, and what is counted and assumed for it; see `conf/placement`."""

    rule: Literal["optimal", "powerinfer", "layers", "none"] = "optimal"
    hot: Literal["masked", "dense"] = "masked"
    granularity: Count = 256
    hot_device: str = "4090"
    cold_device: str = "this"
    link_gbs: Positive = 25.0
    latency_us: Annotated[float, Range(0)] = 10.0
    call_us: Annotated[float, Range(0)] = 5.0
    overlap: bool = True
    rows: Count = 1
    context: Count = 512
    activations: str | None = None
    active_share: Share | None = None
    tokens: Count = 2048
    window: Count = 128
    gpu_index: str | None = None
    decode: Size = 0
    devices: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PlacementSettings(ModelSettings):
    """What `kind: placement` reads of a config.

    Attributes:
        vram_budget, n_gpu_layers: GiB of the accelerator, and whole layers on it; None is what there is and what fits.
        reset_gpu_index, disable_gpu_index: as PowerInfer's options of these names.
    """

    placement: PlacementSpec = PlacementSpec()
    vram_budget: Annotated[float, Range(0)] | None = None
    n_gpu_layers: Size | None = None
    reset_gpu_index: bool = False
    disable_gpu_index: bool = False
