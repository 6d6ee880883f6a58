"""The model that a config asks for, with the FFN that it asks for; what gates a sparse one is `methods.gating`."""

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kind import RunContext
from specsparse.experiments.settings import ModelSettings
from specsparse.powerinfer import zero_skip
from specsparse.powerinfer.modes import PREDICTED


def check(cfg: ModelSettings, *, union_cap: bool = False) -> None:
    """The `ffn` and `predictor` groups, before anything is loaded; `union_cap`: whether the kind can use one.

    Raises:
        UserError: options that contradict each other, or a predictor that cannot gate an FFN.
    """
    name, given = cfg.ffn.name, cfg.predictor.name
    if cfg.ffn.union_cap is not None and not union_cap:
        raise UserError("ffn.union_cap is judged beside the uncapped run: give +experiment=spec_sparse")
    if name != PREDICTED:
        if given != "none":
            raise UserError(f"predictor={given} does nothing with ffn={name or 'null'}: give ffn=predicted")
        return
    if given == "none":
        raise UserError(
            "ffn=predicted needs a predictor: give predictor=gate_threshold (SiLU) or predictor=signbit (ReLU)"
        )
    if cfg.ffn.faithful_f16 or cfg.ffn.threshold is not None:
        raise UserError("ffn.faithful_f16 and ffn.threshold belong to ffn=powerinfer")
    from specsparse.experiments.methods import gating  # predictors are read by the runs that have one

    gating.check(cfg)


def load(cfg: ModelSettings, ctx: RunContext) -> Model:
    """The model, its predictor fitted where the config asks for one.

    Raises:
        UserError: a mistake in the model file, or predictors that do not fit it.
    """
    model = ctx.load(cfg.model, **cfg.ffn.overrides())
    if cfg.ffn.name != PREDICTED:
        return model
    from specsparse.experiments.methods import gating

    return gating.sparse_of(cfg, ctx, model).model


def label(model: Model) -> dict[str, str]:
    """What a record says of the FFN and of its promise against the dense model; nothing for a dense one."""
    if model.ffn == "dense":
        return {}
    promise = "as the dense model" if model.ffn == "oracle" else "lossy against the dense model"
    if zero_skip.skips(model.params):
        promise = "bit for bit the dense model"
    return {"ffn": f"{model.ffn}: {model.rule}" if model.rule else model.ffn, "ffn_label": promise}
