"""A config as frozen dataclasses, and how one is read from what Hydra composed; nothing below sees OmegaConf.

The groups that every run has stand here, those of one kind with that kind. Every mistake becomes a `UserError` that
names the key and, for an unknown one, the nearest valid name.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from specsparse.data.prompts import Prompt, load
from specsparse.engine import hosts
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments.command_line import PARTS, completed
from specsparse.models import catalogue
from specsparse.models.catalogue import Download
from specsparse.speculative.base import DEFAULT_GAMMA
from specsparse.speculative.drafters import draw_temperature
from specsparse.support.files import conf_dir
from specsparse.support.options import Count, Internal, OptionError, Read, Rest, Seed, Share, Size, options_of, read
from specsparse.support.registry import Choice

if TYPE_CHECKING:
    from specsparse.runtime.method import MethodSpec

S = TypeVar("S")

STAND_IN = ".stand_in"
"""End of the name and the folder of a run of a stand-in (`experiments.stand_in`)."""
KEPT = "kept"
"""Value of `policy.v` that asks for the times that were kept on this machine."""


def _download(value: object) -> Download:
    """YAML takes a bare yes and no for booleans."""
    spelled: Any = ("yes" if value else "no") if isinstance(value, bool) else value
    if spelled not in get_args(Download):
        raise ValueError(value)
    return spelled


def _stand_in(value: object) -> str | None:
    known = [*catalogue.stand_ins()]
    if value is not False and value not in known:
        raise OptionError("stand_in", value, f"false, {', '.join(known[:-1])} or {known[-1]}")
    return str(value) if value else None


NO_PREDICTOR, CHAINS = Choice("none"), Choice("chain")


@dataclass(frozen=True)
class ModelSpec:
    """A GGUF file and options of `specsparse.load`; None leaves the file's (or the engine's) own value."""

    path: str
    context_length: Count | None = None
    kv_dtype: Literal["f32", "f16", "bf16", "q8_0"] | None = None
    rope_base: float | None = None
    rope_scale: float | None = None
    rope_scaling: Literal["none", "linear", "yarn"] | None = None
    yarn: Literal["reference", "llama.cpp"] | None = None
    threads: Count | None = None
    backend: Literal["native", "reference", "xla", "packed", "bf16"] | None = None
    activation: str | None = None
    placement: str | None = None
    hot: str | None = None
    devices: int | tuple[str, ...] | None = None
    mesh: Count | None = None
    distributed: str | None = None
    width: int | Literal["auto"] | None = None

    def overrides(self) -> dict[str, Any]:
        given = {**dataclasses.asdict(self), "path": None, "distributed": None, "mesh": hosts.mesh_of(self.mesh)}
        return {k: v for k, v in given.items() if v is not None}


@dataclass(frozen=True)
class DataSpec:
    source: str = "builtin"
    path: str | None = None  # of the files of a source that has no place of its own
    tasks: tuple[str, ...] | None = None
    limit_per_task: Count | None = None
    chat: bool = True  # wraps each prompt in the model's template as a user's turn
    turns: Literal["first", "both"] = "first"  # of conversations
    split: Literal["blank", "lines"] = "blank"  # of a .txt file into prompts: at blank lines, or each line one
    lengths: tuple[Count, ...] | None = None  # tokens of each prompt with texts of the others before it, one a length

    def prompts(self, *, turns: str = "first") -> list[Prompt]:
        """The prompts of the first turns, or of both. UserError: a file that cannot be read, or an unknown task."""
        given = {"path": self.path, "tasks": self.tasks, "limit_per_task": self.limit_per_task, "split": self.split}
        return load(self.source, turns=turns, **given)

    def read_as(self) -> str | None:
        """A line on what was taken for a prompt of a .txt file; None for other sources."""
        if not self.source.endswith(".txt"):
            return None
        kept, count = len(self.prompts()), len(replace(self, limit_per_task=None).prompts())
        form = {"blank": "between blank lines", "lines": "one a line"}
        other = {"blank": "lines", "lines": "blank"}[self.split]
        prompts = f"{count} prompt{'s' if count > 1 else ''}"
        cut = f"; data.limit_per_task={self.limit_per_task} takes {kept} of them (null: all)" if kept < count else ""
        return f"{self.source}: {prompts}, {form[self.split]} (data.split={other}: {form[other]}){cut}"


@dataclass(frozen=True)
class FfnSpec:
    """The neurons of the FFNs that are computed."""

    # "dense", "powerinfer", "oracle", "predicted" (by the `predictor` group), or None: as the file asks
    name: Literal["dense", "powerinfer", "oracle", "predicted"] | None = None
    threshold: float | None = None  # of the predictors in the file; None: the file's own
    faithful_f16: bool = False  # PowerInfer's roundings
    weights: str | None = None  # file of trained predictors, for predictor=mlp
    tokens: Count = 1024  # of the text that a predictor is fitted to
    masked: bool | None = None  # the neurons' mask lies on dense matrices; None: where it can
    # share of the neurons that a verification pass may read; None: no cap. For kind=spec_sparse
    union_cap: Share | None = None

    def overrides(self) -> dict[str, Any]:
        """Keyword arguments of `specsparse.load` that differ from its defaults."""
        mode = "dense" if self.name == "predicted" else self.name
        given = {"ffn": mode, "threshold": self.threshold, "faithful_f16": self.faithful_f16 or None}
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model, dense or sparse, and a text; `name` is the run's, `seed` that of every draw.

    `stood_in` is a `report.record.StandIn`, if the run is one.
    """

    model: ModelSpec
    ffn: FfnSpec = FfnSpec()
    predictor: Choice = NO_PREDICTOR
    data: DataSpec = DataSpec()
    name: str = "run"
    seed: Seed = 0
    stood_in: Annotated[Any, Internal()] = None


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """A method and the distribution of the text. The drafter "none" is plain decoding, the tree "chain" no tree."""

    drafter: Choice
    verifier: Choice
    policy: Choice
    tree: Choice = CHAINS
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: Count = 128

    @property
    def params(self) -> SamplingParams:
        """The `sampling` group with `max_tokens`, without the keys that are null."""
        given = {k: v for k, v in self.sampling.items() if v is not None}
        return SamplingParams.from_dict({"max_tokens": self.max_tokens, **given})

    @property
    def gamma(self) -> int:
        """Most tokens to draft in a round, as `policy.gamma` has it."""
        return self.policy.options.get("gamma", DEFAULT_GAMMA)

    @property
    def times_are_left_out(self) -> bool:
        """Whether the policy weighs times that the config leaves to this machine; see `configured.filled`."""
        return "v" in self.policy.options and self.policy.options["v"] in (None, KEPT)

    @property
    def spec(self) -> "MethodSpec":
        """The method, with placeholders for times that are left out."""
        from specsparse.runtime.method import NO_DRAFTER, MethodSpec  # a mistake in a config is said without jax

        if self.drafter.name == NO_DRAFTER:
            return MethodSpec()
        options = {key: value for key, value in self.policy.options.items() if value not in (None, KEPT)}
        if self.times_are_left_out:
            options["v"] = [1.0] * (self.gamma + 1)
        return MethodSpec(self.drafter, self.verifier, Choice(self.policy.name, options), self.tree, self.params)


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(ModelSettings, MethodSettings):
    """The settings of a run that decodes prompts plainly and with methods."""

    repeats: Count | Literal["auto"] = 1  # of the timed passes; "auto": see `specsparse.measure.speedups`
    warmup: bool = True  # an untimed pass first
    prefix_caching: bool = False  # each prompt is read once for all passes
    stream: bool = True  # show its text
    common_noise: bool = False  # all prompts draw from `seed` itself; else each has noise of its own, keyed by its id
    loop: Literal["jit", "host"] = "jit"  # "jit", or "host" to decode with the host loop beside the loop in one program
    time_split: Size = 0  # tokens to decode round by round per task, for the time split; 0: none
    trace: bool = False  # show the first pass round by round
    record_laws: Size = 0  # tokens of each distribution of p and q to keep for `replay`; 0: none


@dataclass(frozen=True, kw_only=True)
class RunConfig(DecodingSettings):
    """One run, validated but for what its kind alone reads."""

    tracker: Choice  # takes the numbers beside JSON lines, which are always written
    kind: str = "speed"  # a name of `experiments.kind.KINDS` or `module:Class`
    debug: bool = False  # mistakes with their traceback
    reuse: bool = True  # whether a sweep takes over cells that have finished before
    # whether models of the catalogue that are not on this machine are downloaded; "ask": see
    # `models.catalogue.obtain`
    download: Annotated[Download, Read(_download, "yes, no or ask")] = "ask"
    # name of the embedded pair that runs if the models cannot be had, see `experiments.stand_in`
    stand_in: Annotated[str | None, Read(_stand_in, "false or the name of a stand-in")] = None
    # the keys that are not everybody's; the kind's class of settings reads them
    own: Annotated[dict[str, Any], Rest()] = field(default_factory=dict)
    # the whole config as plain containers, for the record
    composed: Annotated[dict[str, Any], Internal()] = field(default_factory=dict, repr=False)
    # those of the command line, of which a model's or a drafter's name forbids the stand-in
    words: Annotated[tuple[str, ...], Internal()] = ()


def from_omegaconf(cfg: DictConfig | Mapping[str, object]) -> RunConfig:
    """A validated `RunConfig` from Hydra's composed config, but for the keys of its kind; `of_kind` reads those."""
    items = cfg.items_ex(resolve=False) if isinstance(cfg, DictConfig) else cfg.items()
    tree = OmegaConf.create({key: value for key, value in items if key != "hydra"})
    for group, registry in PARTS.items():  # a `???` of a choice's file, if the option has another name here
        part = tree.get(group)
        missing = [key for key in part if OmegaConf.is_missing(part, key)] if isinstance(part, DictConfig) else []
        for key in missing:
            option = registry.options(part.name).get(str(key)) if registry.is_builtin(part.name) else None
            if option is not None and any(alias in part for alias in option.aliases):
                del part[key]
    try:
        plain: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        missing = isinstance(error, MissingMandatoryValue)
        raise UserError(f"{key}: {'a value is needed' if missing else str(error).splitlines()[0]}") from error
    assert isinstance(plain, dict)
    read(RunConfig, plain, group="", null=True)  # what is wrong here needs no class of a part, which may import jax
    plain |= {group: completed(group, plain[group]) for group in PARTS if isinstance(plain.get(group), dict)}
    run = read(RunConfig, plain, group="", internal={"composed": plain}, null=True)
    # `drafter.temperature=null`: verifiers that weigh q want drafts that are drawn from it. `params` fails here, not
    # after the model is loaded.
    options, drawn_at = run.drafter.options, draw_temperature(run.verifier.name, run.params.temperature)
    if options.get("temperature", 0.0) is not None or drawn_at is None:
        return run
    return replace(run, drafter=replace(run.drafter, options={**options, "temperature": drawn_at}))


def of_kind(run: RunConfig, owner: type[S]) -> S:
    """The groups of a run that a kind's class of settings names. UserError: a key of the run that is nobody's."""
    wanted, common = options_of(owner), options_of(RunConfig)
    given = {**{key: getattr(run, key) for key in wanted if key in common}, **run.own}
    internal = {"stood_in": run.stood_in} if issubclass(owner, ModelSettings) else {}
    return read(owner, given, group="", name=f"kind={run.kind}", internal=internal, null=True)


def choice_from_file(group: str, name: str) -> Choice:
    """A choice with the options of its YAML file and its class; without a file it has none."""
    path = conf_dir() / group / f"{name}.yaml"
    given: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    assert isinstance(given, dict)
    given = completed(group, given) if group in PARTS else given
    return Choice(name, {str(key): value for key, value in given.items() if key != "name"})


def valid_keys() -> list[str]:
    """Every dotted key that all runs have (options of drafters and the like are checked by their owners)."""
    keys = ["policy.gamma", *(f"sampling.{name}" for name in options_of(SamplingParams))]
    for name, option in options_of(RunConfig).items():
        inner = options_of(option.hint) if dataclasses.is_dataclass(option.hint) else ()
        keys += [name, *(f"{name}.{sub}" for sub in inner)]
    return keys
