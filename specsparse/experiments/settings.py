"""The groups of a run's config and the run itself, as frozen dataclasses; `config` fills them."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from specsparse.support.options import Count, Internal, Range, Rest, Share, Size

OfChoice = Annotated[dict[str, Any], Rest()]
"""Options of a choice, which checks them when it is made."""


@dataclass(frozen=True)
class ModelSpec:
    """Which GGUF file, and what of it to override; None leaves the file's (or the engine's) own value.

    `placement`, `hot` and `devices` are those of `specsparse.load`: a gpuidx file, and how its neurons are computed; so
    is `mesh`, the number of devices that a dense model is divided among.
    """

    path: str
    context_length: Count | None = None
    kv_dtype: Literal["f32", "f16", "bf16"] | None = None
    rope_base: float | None = None
    rope_scale: float | None = None
    rope_scaling: Literal["none", "linear", "yarn"] | None = None
    threads: Count | None = None
    backend: Literal["native", "reference", "xla"] | None = None
    activation: str | None = None
    placement: str | None = None
    hot: str | None = None
    devices: int | None = None
    mesh: Count | None = None

    def overrides(self) -> dict[str, Any]:
        """Keyword arguments of `specsparse.load`: what is not None."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "path" and v is not None}


@dataclass(frozen=True)
class DrafterSpec:
    """A registered drafter and its own options; the name "none" is plain decoding."""

    name: str
    options: OfChoice = field(default_factory=dict)


@dataclass(frozen=True)
class VerifierSpec:
    """A registered verifier and its own options."""

    name: str
    options: OfChoice = field(default_factory=dict)


@dataclass(frozen=True)
class TreeSpec:
    """The shape of the drafts of a drafter with a model and its own options; the name "chain" is no tree."""

    name: str = "chain"
    options: OfChoice = field(default_factory=dict)


@dataclass(frozen=True)
class PolicySpec:
    """How many tokens to propose in a round; gamma >= 1."""

    name: str
    gamma: Count = 7
    options: OfChoice = field(default_factory=dict)


@dataclass(frozen=True)
class DataSpec:
    """Which prompts; `chat` wraps each in the model's template as a user's turn; `turns` of conversations."""

    source: str = "builtin"
    tasks: tuple[str, ...] | None = None
    limit_per_task: Count | None = None
    chat: bool = True
    turns: Literal["first", "both"] = "first"


@dataclass(frozen=True)
class TrackerSpec:
    """Where the numbers go: "jsonl", or "wandb" with its options; JSONL is always written."""

    name: str
    options: OfChoice = field(default_factory=dict)


@dataclass(frozen=True)
class PredictorSpec:
    """A registered predictor of active neurons and its own options; the name "none" is no predictor."""

    name: str = "none"
    options: OfChoice = field(default_factory=dict)


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

    name: Literal["dense", "powerinfer", "oracle", "predicted"] | None = None
    threshold: float | None = None
    faithful_f16: bool = False
    weights: str | None = None
    tokens: Count = 1024
    union_cap: Share | None = None

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
        predictors: instead of values: these predictors beside each other, each with the options of its config file.
        recall: of those that can be set to one (svd, signbit), in place of their threshold.
        window, judged: tokens of a piece of text, and pieces that quality is judged on.
        tokens, repeats: to decode for the speed, with each point in turn; 0: quality only.
    """

    vary: str = "share"
    values: tuple[float, ...] = ()
    predictors: tuple[str, ...] = ()
    recall: float | None = None
    window: Annotated[int, Range(4)] = 128
    judged: Count = 6
    tokens: Size = 64
    repeats: Count = 3


@dataclass(frozen=True)
class TrainSpec:
    """What `kind: train_predictors` reads, compares and keeps; the others are `predictors.fit.train.TrainOptions`."""

    tokens: Count = 4096
    window: Annotated[int, Range(4)] = 128
    judged: Count = 8
    active_share: Annotated[float | None, Range(0, 1, above=True, below=True)] = None
    compare: tuple[str, ...] = ()
    output: str | None = None
    options: OfChoice = field(default_factory=dict)


@dataclass(frozen=True)
class PlacementSpec:
    """Which neurons lie on the accelerator, and what is counted and assumed for it; see `conf/placement`."""

    rule: Literal["optimal", "powerinfer", "layers", "none"] = "optimal"
    hot: Literal["masked", "dense"] = "masked"
    granularity: Count = 256
    hot_device: str = "4090"
    cold_device: str = "this"
    link_gbs: float = 25.0
    latency_us: float = 10.0
    call_us: float = 5.0
    overlap: bool = True
    rows: Count = 1
    context: Count = 512
    activations: str | None = None
    active_share: Share | None = None
    tokens: Count = 2048
    window: Count = 128
    gpu_index: str | None = None
    decode: Size = 0


@dataclass(frozen=True)
class CompareSpec:
    """Which methods `kind: compare` tries: every valid pair; `verifiers` None is all lossless ones."""

    drafters: tuple[str, ...] = ("prompt_lookup",)
    verifiers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CertifySpec:
    """What `kind: certify` enumerates; see `speculative.proof.certify.certify`."""

    verifiers: tuple[str, ...] | None = None
    vocab: Annotated[int, Range(2, 6)] = 4
    gamma: Annotated[int, Range(1, 3)] = 3
    mutants: bool = True


@dataclass(frozen=True)
class RooflineSpec:
    """What `kind: roofline` predicts for: a device by name, tokens in the cache; `refresh` measures this one again.

    On this machine drafting is measured too: chains of `drafters`, and `trees`.
    """

    device: str = "this"
    kv_length: Size | None = None
    refresh: bool = False
    drafters: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()


@dataclass(frozen=True)
class PerplexitySpec:
    """What `kind: perplexity` reads and how; see `specsparse.runtime.perplexity.windows`.

    Attributes:
        text: a text file, read as it is; None is the prompts of the data group, one after the other.
        context, stride: of the windows.
        chunks: at most so many windows; None for all.
        base: whose law the KL is from: "f32", the same weights computed in float32; a model; None for no KL.
    """

    text: str | None = None
    context: Annotated[int, Range(4)] = 512
    stride: Size = 0
    chunks: Count | None = None
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
    pp: Size = 512
    tg: Size = 64
    timings: Count = 3


@dataclass(frozen=True)
class RunConfig:
    """One run, validated. `composed` is the whole config as plain containers, for the record.

    Attributes:
        kind: what is run, a name of `experiments.kind.KINDS` or `module:Class`.
        repeats: of the timed passes; "auto": see `specsparse.measure.repeats`.
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
    max_tokens: Count = 128
    seed: Size = 0
    repeats: Count | Literal["auto"] = 1
    warmup: bool = True
    stream: bool = True
    debug: bool = False
    reuse: bool = True
    kind: str = "speed"
    loop: Literal["jit", "host"] = "jit"
    time_split: Size = 0
    trace: bool = False
    record_laws: Size = 0
    compare: CompareSpec = CompareSpec()
    certify: CertifySpec = CertifySpec()
    roofline: RooflineSpec = RooflineSpec()
    train: TrainSpec = TrainSpec()
    powerinfer: PowerInferSpec = PowerInferSpec()
    sparsity: SparsitySpec = SparsitySpec()
    placement: PlacementSpec = PlacementSpec()
    vram_budget: float | None = None
    n_gpu_layers: Size | None = None
    reset_gpu_index: bool = False
    disable_gpu_index: bool = False
    perplexity: PerplexitySpec = PerplexitySpec()
    quant_table: QuantTableSpec = QuantTableSpec()
    composed: Annotated[dict[str, Any], Internal()] = field(default_factory=dict, repr=False)
