"""A kind of experiment: it checks a config, runs it and returns a result, which `runner` writes down.

Each built-in kind is a module of `experiments.kinds`. One's own is named `kind=my_package.mine:MyKind`, or comes with
a package that has entry points `specsparse.kinds`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, get_args

from rich.console import Console, RenderableType

from specsparse.engine.config import OVERRIDES, ModelConfig
from specsparse.engine.gguf.reader import GGUFFile, open_gguf
from specsparse.engine.model import Model
from specsparse.experiments.settings import DecodingSettings, ModelSpec, RunConfig
from specsparse.experiments.trackers.tracking import Tracking
from specsparse.models import catalogue
from specsparse.runtime.results import Generation
from specsparse.support import terminal
from specsparse.support.registry import Registry

if TYPE_CHECKING:
    from specsparse.report.plots import Figure, Rows  # matplotlib takes a second


class Engine(Protocol):
    """The part of `specsparse.api` that a run needs; tests give a scripted one."""

    def load(self, spec: str, **overrides: Any) -> Model: ...

    def generate(self, model: Model, prompt: Any, **options: Any) -> Generation: ...

    def stream(self, model: Model, prompt: Any, **options: Any) -> Any:
        """An iterator of text pieces with `.generation` at its end."""


@dataclass(frozen=True)
class RunContext:
    """The directory of a run's files, there from the first use of `tracker` on, its engine and console, its config."""

    directory: Path
    engine: Engine
    console: Console
    cfg: RunConfig | None = None

    @cached_property
    def tracker(self) -> Tracking:
        """Takes rows and points while the run goes on; what an earlier run left in the directory is removed."""
        return Tracking(self.directory, self.cfg, self.console)

    def stop(self) -> None:
        """The run ends with an error; a tracker that follows it is told."""
        if "tracker" in vars(self):
            self.tracker.stop()

    def load(self, model: ModelSpec, *, title: str = "", **more: Any) -> Model:
        """A model, with a bar; `more` takes the place of what its group of the config overrides."""
        with terminal.loading(self.console, f"loading {title or model.path}") as progress:
            return self.engine.load(model.path, progress=progress, **{**model.overrides(), **more})

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[..., None]]:
        return terminal.counting(self.console, what, total)


def header_of(model: ModelSpec) -> tuple[GGUFFile, ModelConfig]:
    """A model's file and its config, without its weights. UserError: no such file, or a mistake in it."""
    file = open_gguf(catalogue.resolve(model.path))
    overrides = {key: value for key, value in model.overrides().items() if key in OVERRIDES}
    return file, ModelConfig.from_gguf(file, overrides=overrides)


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        summary: the numbers, for the record.
        result: the same as an object of the kind's own, for callers in Python.
        shown: printed in this order; a text is a line.
        figures: become CSV, and PNG if they are drawn.
        files: names of files that the kind itself wrote into the directory.
        trained: models that the run made, wherever they lie, for the record.
        definitions: of the numbers, for the record.
        more: further keys of the record.
        as_promised: False makes the command exit with code 1.
        objective: what a sweeper maximises.
    """

    summary: Mapping[str, object]
    result: Any = None
    shown: Sequence[RenderableType] = ()
    figures: Sequence["Figure | Rows"] = ()
    files: Sequence[str] = ()
    trained: Sequence[Path] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, object] = field(default_factory=dict)
    as_promised: bool = True
    objective: float | None = None

    def _repr_html_(self) -> str | None:
        """The result's own table in a notebook, if it has one."""
        shown = getattr(self.result, "_repr_html_", None)
        return None if shown is None else shown()


S = TypeVar("S")


class Kind(abc.ABC, Generic[S]):
    """One kind of experiment.

    Attributes:
        settings: a frozen dataclass, what it reads of a config: groups of its own beside those that every run has; by
            default what stands in brackets, `class Mine(Kind[MySettings])`.
        timed: whether its numbers depend on what else the machine does; such runs take turns, and their tracker starts
            when they are over, unless they start it themselves.
        resumes: whether it goes on from a folder if it was stopped; it then starts its tracker by
            `ctx.tracker.follow(folder)`, before its work.
        takes_model: False: it needs no model, and the manifest names none.
        takes_ffn: False: it needs no model, or a dense one.
        takes_lengths: True: it decodes `decoding.prepared_prompts`, of which `data.lengths` makes one a length.
        on_mesh: whether its model may be divided among devices; it then asks nothing of it but its forward function.
    """

    settings: ClassVar[type] = DecodingSettings
    timed: ClassVar[bool] = True
    resumes: ClassVar[bool] = False
    takes_model: ClassVar[bool] = True
    takes_ffn: ClassVar[bool] = True
    takes_lengths: ClassVar[bool] = False
    on_mesh: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        named = (arg for base in vars(cls).get("__orig_bases__", ()) for arg in get_args(base))
        found: Any = next((arg for arg in named if dataclasses.is_dataclass(arg)), None)
        if found is not None and "settings" not in vars(cls):
            cls.settings = found

    @abc.abstractmethod
    def check(self, cfg: S) -> None:
        """UserError: whatever is wrong. Nothing is loaded or written; the runner checks name and tracker."""

    @abc.abstractmethod
    def run(self, cfg: S, ctx: RunContext) -> RunResult:
        """Runs with checked settings. UserError: a text too short, a mistake in the model file."""


KINDS: Registry[Kind] = Registry("kind", "specsparse.experiments.kind:Kind", "specsparse.experiments.kinds", {
    "speed": "speed:Speed",  # plain decoding and one method, interleaved
    "compare": "compare:Compare",  # plain decoding and every valid method of a list, ranked
    "certify": "certificate:Certify",  # the exact output distribution of every verifier; needs no model
    "roofline": "device_roofline:RooflineKind",  # what a model file could do at best on a device, and what it does here
    "train_drafter": "train_drafter:TrainDrafter",  # a head or a draft model, trained and judged
    "train_experts": "train_experts:TrainExperts",  # a small mixture of ReLU experts, trained from nothing
    "experts_union": "experts_union:ExpertsUnion",  # experts that rows wake together, and their idle neurons
    "relufy": "relufy:Relufy",  # FFNs turned to ReLU, and what that cost
    "placement": "neuron_placement:Place",  # which neurons belong on the accelerator
    "perplexity": "quality:Perplexity",  # how well a model predicts a text, and how far it is from float32
    "quant_table": "quality:Quantisations",  # bytes, quality and speed in several types of weights
    "train_predictors": "train_predictors:TrainPredictors",  # a predictor of active neurons, fitted and judged
    "powerinfer_oracle": "powerinfer_oracle:PowerInferOracle",  # logits and tokens against PowerInfer's
    "sparsity": "sparsity:SparsityKind",  # what leaving neurons out costs and gains, point by point
    "spec_sparse": "spec_sparse:SpecSparse",  # speculation and sparsity, each alone and both together
})  # fmt: skip
