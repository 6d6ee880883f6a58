"""From Hydra's composed config to frozen dataclasses; nothing else in the library sees OmegaConf.

Every mistake becomes a `UserError` that names the key and, for an unknown one, the nearest valid name.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from specsparse.engine.params import SamplingParams
from specsparse.errors import UserError


@dataclass(frozen=True)
class ModelSpec:
    """Which GGUF file, and what of it to override; None leaves the file's (or the engine's) own value.

    `placement`, `hot` and `devices` are those of `specsparse.load`: a gpuidx file, and how its neurons are computed.
    """

    path: str
    context_length: int | None = None
    kv_dtype: str | None = None
    rope_base: float | None = None
    rope_scale: float | None = None
    rope_scaling: str | None = None
    threads: int | None = None
    backend: str | None = None
    activation: str | None = None
    placement: str | None = None
    hot: str | None = None
    devices: int | None = None

    def overrides(self) -> dict[str, Any]:
        """Keyword arguments of `specsparse.load`: what is not None."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "path" and v is not None}


@dataclass(frozen=True)
class DrafterSpec:
    """A registered drafter and its own options; the name "none" is plain decoding."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifierSpec:
    """A registered verifier and its own options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TreeSpec:
    """The shape of the drafts of a drafter with a model and its own options; the name "chain" is no tree."""

    name: str = "chain"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicySpec:
    """How many tokens to propose in a round; gamma >= 1."""

    name: str
    gamma: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSpec:
    """Which prompts; `chat` wraps each in the model's template as a user's turn; `turns` of conversations."""

    source: str = "builtin"
    tasks: tuple[str, ...] | None = None
    limit_per_task: int | None = None
    chat: bool = True
    turns: str = "first"


@dataclass(frozen=True)
class TrackerSpec:
    """Where the numbers go: "jsonl", or "wandb" with its options; JSONL is always written."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PredictorSpec:
    """A registered predictor of active neurons and its own options; the name "none" is no predictor."""

    name: str = "none"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FfnSpec:
    """Which neurons of the FFNs are computed.

    Attributes:
        name: "dense", "powerinfer", "oracle", "predicted" (by the `predictor` group), or None: as the file asks.
        threshold: of the predictors in the file; None: the file's own.
        faithful_f16: PowerInfer's roundings.
        weights: file of trained predictors, for predictor=mlp.
        tokens: of the text that a predictor is fitted to.
        union_cap: share of the neurons that a verification pass may read; None: no cap. For kind=spec_sparse.
    """

    name: str | None = None
    threshold: float | None = None
    faithful_f16: bool = False
    weights: str | None = None
    tokens: int = 1024
    union_cap: float | None = None

    def overrides(self) -> dict[str, Any]:
        """Keyword arguments of `specsparse.load`: what differs from its defaults."""
        mode = "dense" if self.name == "predicted" else self.name
        given = {"ffn": mode, "threshold": self.threshold, "faithful_f16": self.faithful_f16 or None}
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True)
class PowerInferSpec:
    """What `kind: powerinfer_oracle` compares: PowerInfer's logits (None: logits.npz beside the model), threads."""

    logits: str | None = None
    threads: tuple[int, ...] = (1, 2, 4)


@dataclass(frozen=True)
class SparsitySpec:
    """What `kind: sparsity` judges and times.

    Attributes:
        vary: option of the predictor, or "threshold" with ffn=powerinfer, that takes each of `values`; without values
            the config itself is the only point.
        window, judged: tokens of a piece of text, and pieces that quality is judged on.
        tokens, repeats: to decode for the speed, with each point in turn; 0: quality only.
    """

    vary: str = "share"
    values: tuple[float, ...] = ()
    window: int = 128
    judged: int = 6
    tokens: int = 64
    repeats: int = 3


@dataclass(frozen=True)
class TrainSpec:
    """What `kind: train_predictors` reads, compares and keeps; the other keys are `predictors.train.TrainOptions`."""

    tokens: int = 4096
    window: int = 128
    judged: int = 8
    active_share: float | None = None
    compare: tuple[str, ...] = ()
    output: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacementSpec:
    """Which neurons lie on the accelerator, and what is counted and assumed for it; see `conf/placement`."""

    rule: str = "optimal"
    hot: str = "masked"
    granularity: int = 256
    hot_device: str = "4090"
    cold_device: str = "this"
    link_gbs: float = 25.0
    latency_us: float = 10.0
    call_us: float = 5.0
    overlap: bool = True
    rows: int = 1
    context: int = 512
    activations: str | None = None
    active_share: float | None = None
    tokens: int = 2048
    window: int = 128
    gpu_index: str | None = None
    decode: int = 0


@dataclass(frozen=True)
class CompareSpec:
    """Which methods `kind: compare` tries: every valid pair; `verifiers` None is all lossless ones."""

    drafters: tuple[str, ...] = ("prompt_lookup",)
    verifiers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CertifySpec:
    """What `kind: certify` enumerates; see `speculative.certify.certify`."""

    verifiers: tuple[str, ...] | None = None
    vocab: int = 4
    gamma: int = 3
    mutants: bool = True


@dataclass(frozen=True)
class RooflineSpec:
    """What `kind: roofline` predicts for: a device by name, tokens in the cache; `refresh` measures this one again."""

    device: str = "this"
    kv_length: int | None = None
    refresh: bool = False


@dataclass(frozen=True)
class PerplexitySpec:
    """What `kind: perplexity` reads and how; see `specsparse.perplexity.windows`.

    Attributes:
        text: a text file, read as it is; None is the prompts of the data group, one after the other.
        context, stride: of the windows.
        chunks: at most so many windows; None for all.
        base: whose law the KL is from: "f32", the same weights computed in float32; a model; None for no KL.
    """

    text: str | None = None
    context: int = 512
    stride: int = 0
    chunks: int | None = None
    base: str | None = "f32"


@dataclass(frozen=True)
class QuantTableSpec:
    """The rows and the timings of `kind: quant_table`; its text is that of `perplexity`.

    Attributes:
        types: to quantise the model to, where its own type is no row of its own.
        files: further GGUF files of the same model.
        pp, tg: tokens of prompt and of decoding to time; 0 for none.
        timings: of each.
    """

    types: tuple[str, ...] = ("F16", "Q8_0", "Q4_1", "Q4_0")
    files: tuple[str, ...] = ()
    pp: int = 512
    tg: int = 64
    timings: int = 3


@dataclass(frozen=True)
class RunConfig:
    """One run, validated. `composed` is the whole config as plain containers, for the record.

    Attributes:
        kind: what is run, a name of `experiments.KINDS`.
        reuse: whether a sweep takes over cells that have finished before.
        loop: "jit", or "host" to decode with the host loop beside the loop in one program.
        time_split: tokens to decode round by round per task, for the time split; 0: none.
        trace: show the first pass round by round.
        record_laws: tokens of each law of p and q to keep for `replay`; 0: none.
        vram_budget, n_gpu_layers: GiB of the accelerator, and whole layers on it; None is what there is and what fits.
        reset_gpu_index, disable_gpu_index: as PowerInfer's options of these names.
    """

    model: ModelSpec
    drafter: DrafterSpec
    verifier: VerifierSpec
    policy: PolicySpec
    sampling: dict[str, Any]
    data: DataSpec
    tracker: TrackerSpec
    tree: TreeSpec = TreeSpec()
    predictor: PredictorSpec = PredictorSpec()
    ffn: FfnSpec = FfnSpec()
    name: str = "run"
    max_tokens: int = 128
    seed: int = 0
    repeats: int = 1
    warmup: bool = True
    stream: bool = True
    debug: bool = False
    reuse: bool = True
    kind: str = "speed"
    loop: str = "jit"
    time_split: int = 0
    trace: bool = False
    record_laws: int = 0
    compare: CompareSpec = CompareSpec()
    certify: CertifySpec = CertifySpec()
    roofline: RooflineSpec = RooflineSpec()
    train: TrainSpec = TrainSpec()
    powerinfer: PowerInferSpec = PowerInferSpec()
    sparsity: SparsitySpec = SparsitySpec()
    placement: PlacementSpec = PlacementSpec()
    vram_budget: float | None = None
    n_gpu_layers: int | None = None
    reset_gpu_index: bool = False
    disable_gpu_index: bool = False
    perplexity: PerplexitySpec = PerplexitySpec()
    quant_table: QuantTableSpec = QuantTableSpec()
    composed: dict[str, Any] = field(default_factory=dict, repr=False)


# Key, lower bound: what a type cannot say.
_AT_LEAST = {
    "max_tokens": 1,
    "repeats": 1,
    "seed": 0,
    "policy.gamma": 1,
    "model.context_length": 1,
    "model.threads": 1,
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
    sampling_params(run)  # fails here, not after the model is loaded
    return run


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


def _convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type `hint` asks for; an int is taken for a float, nothing else is converted."""
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, path)
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _convert(next(o for o in options if o is not type(None)), value, path)
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
        raise UserError(f"{path}={shown}: expected {names[hint]}")
    return value
