"""Kinds of experiment: each a module with `check(cfg)` and `run(cfg, directory, engine=, console=)`.

`run` writes record.json into the directory, shows what it found, and returns an `Outcome`.
"""

import importlib
from types import ModuleType
from typing import Protocol

from specsparse.errors import UserError
from specsparse.experiments.config import RunConfig

KINDS = {
    "speed": "plain decoding and one method, interleaved",
    "compare": "plain decoding and every valid method of a list, ranked",
    "certify": "the exact output law of every verifier, by its rule and as it runs, and of the mutants; needs no model",
    "roofline": "what the model file could do at best on a device, and what it was measured to do here",
    "train_drafter": "a head for a model, trained on text that the model writes, and judged",
    "relufy": "a model's FFNs turned to ReLU, layer by layer and then together, and what that cost",
    "placement": "which neurons belong on the accelerator, and the time a token that is expected of it",
    "perplexity": "how well a model predicts a text, and how far its law is from the float32 one",
    "quant_table": "bytes, quality and speed of a model in several types of weights",
    "train_predictors": "a predictor of active neurons trained or fitted on text, and judged",
    "powerinfer_oracle": "a PowerInfer model's logits and greedy tokens against those PowerInfer itself wrote",
    "sparsity": "what leaving neurons out costs in quality and gains in speed, point by point",
    "spec_sparse": "speculation and sparsity, each alone and both together, and what a verification pass reads",
}
"""Names of modules of `experiments.kinds`, and what each does."""
WITHOUT_FFN = ("certify", "roofline", "train_drafter", "train_predictors", "relufy")
"""Kinds that need no model, or a dense one."""
WITH_MESH = ("speed", "compare", "perplexity")
"""Kinds whose model may be divided among devices: they ask nothing of it but its forward function."""

UNTIMED = frozenset({"certify", "perplexity", "powerinfer_oracle", "relufy", "train_drafter", "train_predictors"})
"""Kinds whose numbers do not depend on what else the machine does; runs of all others take turns."""


class Outcome(Protocol):
    """What a run returns."""

    @property
    def as_promised(self) -> bool:
        """False makes the command exit with code 1."""

    @property
    def objective(self) -> float | None:
        """What a sweeper maximises."""


def check_name(cfg: RunConfig) -> None:
    """Raises UserError unless the run's name can be that of a directory."""
    if cfg.name in ("", ".", "..") or "/" in cfg.name:
        raise UserError(f"name={cfg.name}: a plain name is needed, it becomes a directory")


def module_of(kind: str) -> ModuleType:
    """The module of a kind, imported now.

    Raises:
        UserError: an unknown kind.
    """
    if kind not in KINDS:
        raise UserError(f"kind={kind}: must be one of {', '.join(KINDS)}")
    return importlib.import_module(f"specsparse.experiments.kinds.{kind}")
