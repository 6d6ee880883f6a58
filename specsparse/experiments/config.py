"""From Hydra's composed config to frozen dataclasses; nothing else in the library sees OmegaConf.

Every mistake becomes a `UserError` that names the key and, for an unknown one, the nearest valid name.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments.settings import (
    CertifySpec,
    CompareSpec,
    DataSpec,
    DrafterSpec,
    FfnSpec,
    ModelSpec,
    PerplexitySpec,
    PlacementSpec,
    PolicySpec,
    PowerInferSpec,
    PredictorSpec,
    QuantTableSpec,
    RooflineSpec,
    RunConfig,
    SparsitySpec,
    TrackerSpec,
    TrainSpec,
    TreeSpec,
    VerifierSpec,
)

__all__ = [
    "CertifySpec",
    "CompareSpec",
    "DataSpec",
    "DrafterSpec",
    "FfnSpec",
    "ModelSpec",
    "PerplexitySpec",
    "PlacementSpec",
    "PolicySpec",
    "PowerInferSpec",
    "PredictorSpec",
    "QuantTableSpec",
    "RooflineSpec",
    "RunConfig",
    "SparsitySpec",
    "TrackerSpec",
    "TrainSpec",
    "TreeSpec",
    "VerifierSpec",
    "choice_options",
    "from_omegaconf",
    "nearest",
    "sampling_params",
    "valid_keys",
]

# Key, lower bound: what a type cannot say.
_AT_LEAST = {
    "max_tokens": 1,
    "repeats": 1,
    "seed": 0,
    "policy.gamma": 1,
    "model.context_length": 1,
    "model.threads": 1,
    "model.mesh": 1,
    "data.limit_per_task": 1,
    "time_split": 0,
    "record_laws": 0,
    "certify.vocab": 2,
    "certify.gamma": 1,
    "roofline.kv_length": 0,
    "ffn.tokens": 1,
    "sparsity.window": 4,
    "sparsity.judged": 1,
    "sparsity.tokens": 0,
    "sparsity.repeats": 1,
    "train.tokens": 1,
    "train.window": 4,
    "train.judged": 1,
    "placement.granularity": 1,
    "placement.rows": 1,
    "placement.context": 1,
    "placement.tokens": 1,
    "placement.window": 1,
    "placement.decode": 0,
    "n_gpu_layers": 0,
    "perplexity.context": 4,
    "perplexity.stride": 0,
    "perplexity.chunks": 1,
    "quant_table.pp": 0,
    "quant_table.tg": 0,
    "quant_table.timings": 1,
}
WEIGHS_DRAWS = ("token", "block")
"""Verifiers of chains that weigh p against the law that drafts were drawn from."""

_CHOICES = {
    "model.kv_dtype": ("f32", "f16", "bf16"),
    "model.rope_scaling": ("none", "linear", "yarn"),
    "model.backend": ("native", "reference", "xla"),
    "ffn.name": ("dense", "powerinfer", "oracle", "predicted"),
    "loop": ("jit", "host"),
    "data.turns": ("first", "both"),
    "placement.rule": ("optimal", "powerinfer", "layers", "none"),
    "placement.hot": ("masked", "dense"),
    "certify.vocab": (2, 3, 4, 5, 6),
    "certify.gamma": (1, 2, 3),
}


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint for a name that is not valid, beginning with "; ": the nearest one, or all where none is near."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; valid: {', '.join(names)}"


def from_omegaconf(cfg: Any) -> RunConfig:
    """A validated `RunConfig` from Hydra's composed config (a DictConfig, or a plain mapping).

    Raises:
        UserError: an unknown key, a missing or mistyped value, a value out of range, a broken interpolation.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    tree = OmegaConf.create({key: value for key, value in _items(cfg) if key != "hydra"})
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        missing = isinstance(error, MissingMandatoryValue)
        raise UserError(f"{key}: {'a value is needed' if missing else str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    for key, low in _AT_LEAST.items():
        value = _look_up(plain, key)
        if isinstance(value, int) and value < low:
            raise UserError(f"{key}={value}: must be at least {low}")
    for key, choices in _CHOICES.items():
        value = _look_up(plain, key)
        if value is not None and value not in choices:
            raise UserError(f"{key}={value}: must be one of {', '.join(map(str, choices))}")
    run = _build(RunConfig, {**plain, "composed": plain}, "")
    return _drawn(run, sampling_params(run))  # fails here, not after the model is loaded


def _drawn(run: RunConfig, target: SamplingParams) -> RunConfig:
    """`drafter.temperature=null` filled in: verifiers that weigh q want drafts that are drawn from it."""
    options = run.drafter.options
    if options.get("temperature", 0.0) is not None or run.verifier.name not in WEIGHS_DRAWS:
        return run
    own = dataclasses.replace(run.drafter, options={**options, "temperature": target.temperature})
    return dataclasses.replace(run, drafter=own)


def choice_options(path: Path) -> dict[str, Any]:
    """The options that a choice of a config group (its YAML file) gives, without its name; empty where it is none."""
    from omegaconf import OmegaConf

    given = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    return {str(key): value for key, value in given.items() if key != "name"}  # type: ignore[union-attr]


def sampling_params(cfg: RunConfig) -> SamplingParams:
    """The `sampling` group with `max_tokens`, without the keys that are null.

    Raises:
        UserError: an unknown name or a value out of range.
    """
    given = {k: v for k, v in cfg.sampling.items() if v is not None}
    return SamplingParams.from_dict({"max_tokens": cfg.max_tokens, **given})


def valid_keys() -> list[str]:
    """Every dotted key of the schema (options of drafters and the like are checked by their owners)."""
    keys = []
    for f in dataclasses.fields(RunConfig):
        keys.append(f.name)
        if dataclasses.is_dataclass(f.type):
            keys += [f"{f.name}.{sub.name}" for sub in dataclasses.fields(f.type)]
    keys += [f"sampling.{f.name}" for f in dataclasses.fields(SamplingParams)]
    return [key for key in keys if not key.endswith(("composed", ".options"))]


def _items(cfg: Any) -> Iterable[tuple[str, Any]]:
    from omegaconf import DictConfig

    return cfg.items_ex(resolve=False) if isinstance(cfg, DictConfig) else cfg.items()


def _look_up(plain: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        if not isinstance(plain, Mapping) or part not in plain:
            return None
        plain = plain[part]
    return plain


def _build(cls: type, values: Any, path: str) -> Any:
    """An instance of dataclass `cls` from a mapping; unknown keys go to its `options` where it has one."""
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: expected a group of values, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    prefix = f"{path}." if path else ""
    known, rest = {}, {}
    for key, value in values.items():
        if key in fields and key != "options":
            known[key] = _convert(fields[key].type, value, f"{prefix}{key}")
        else:
            rest[str(key)] = value
    if rest and "options" in fields:
        known["options"] = rest
    elif rest:
        key = next(iter(rest))
        raise UserError(f"unknown key {prefix}{key}{nearest(key, [n for n in fields if n != 'composed'])}")
    missing = [n for n, f in fields.items() if n not in known and _required(f)]
    if missing:
        raise UserError(f"{prefix}{missing[0]}: a value is needed")
    return cls(**known)


def _required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, path: str, *, instead: Iterable[str] = ()) -> Any:
    """`value` as the type `hint` asks for; an int is taken for a float, nothing else is converted.

    `instead`: words that would have been taken too, for the message.
    """
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, path)
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        words = [w for o in options if typing.get_origin(o) is Literal for w in typing.get_args(o)]
        if value in words:
            return value
        kind = next(o for o in options if o is not type(None) and typing.get_origin(o) is not Literal)
        return _convert(kind, value, path, instead=words)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            raise UserError(f"{path}={value}: expected a list, such as [a,b]")
        return tuple(_convert(typing.get_args(hint)[0], item, path) for item in items)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{path}={value}: expected a group of values")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if type(value) is not hint:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        shown = "null" if value is None else value
        raise UserError(f"{path}={shown}: expected {' or '.join([names[hint], *instead])}")
    return value
