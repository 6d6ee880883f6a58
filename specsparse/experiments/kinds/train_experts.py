"""`kind: train_experts`: a small mixture of ReLU experts, trained from nothing on this package's own source files.

Checkpoints, the model and prompts from files that it has not seen lie in a directory that a later run goes on from.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from rich.text import Text

from specsparse.experiments.kind import RunContext, RunResult
from specsparse.experiments.kinds import train_settings
from specsparse.experiments.kinds.train_settings import STATE, TRAINING, Training, TrainSettings
from specsparse.models.convert.write import out_type
from specsparse.report.plots import Rows
from specsparse.support import tables
from specsparse.support.files import write_atomically
from specsparse.support.options import Count, Range
from specsparse.training import mixture
from specsparse.training.corpus import read_documents
from specsparse.training.mixture import MixtureLosses, MixtureOptions, MixtureTrainer
from specsparse.training.training_loop import Log

FOLDER, FILE, PROMPTS = Path("experts"), "experts.gguf", "held_out.jsonl"
"""The default directory of a training, the model in it, and the prompts to try it on."""
DEFINITIONS = {
    "loss": "cross entropy of the next token in nats, mean since the point before",
    "held_out": "the same on files that it has not seen",
    "balance": "E times the sum over experts of their share of choices times their mean probability, mean over layers; "
    "1 if all are used alike (arXiv:2101.03961, eq. 4)",
    "rarest": "share of the choices that the least used expert of a layer has, times E; the least of all layers",
}


@dataclass(frozen=True)
class OwnOptions:
    """Beside the mixture itself; see conf/experiment/train_experts.yaml."""

    documents: tuple[str, ...] = ()
    held_out_every: Annotated[int, Range(2)] = 16  # of the documents
    prompt: Count = 1000  # characters
    save_every: Count = 50
    quantise: str = "Q8_0"


class TrainExperts(Training):
    """A small mixture of ReLU experts, trained and judged."""

    takes_model = False

    def check(self, cfg: TrainSettings) -> None:
        own, _ = train_settings.options(cfg, OwnOptions, MixtureOptions)
        out_type(own.quantise)
        for path in own.documents:
            read_documents(Path(path))

    def run(self, cfg: TrainSettings, ctx: RunContext) -> RunResult:
        """Trains and exports; goes on if an earlier run of the same output was stopped.

        Steps, their rates and their precision may change between two runs; nothing else may.
        """
        own, options = train_settings.options(cfg, OwnOptions, MixtureOptions)
        folder = Path(cfg.train.output or FOLDER)
        documents = [d for path in own.documents for d in read_documents(Path(path))] or mixture.source_documents()
        held = documents[:: own.held_out_every]
        seen = [d for i, d in enumerate(documents) if i % own.held_out_every]
        rates = {"steps", "learning_rate", "warmup", "decay", "precision"}
        shape = {key: value for key, value in vars(options).items() if key not in rates}
        digest = hashlib.sha256("".join(d.text for d in documents).encode()).hexdigest()
        keys = mixture.fitted_vocabulary(seen, options.vocab)
        train, judged = (mixture.windows_of(some, keys, options.rows) for some in (seen, held))
        claimed = {"mixture": shape, "text": digest, "held_out_every": own.held_out_every}
        train_settings.claim(folder, cfg, None, claimed)
        ctx.tracker.follow(folder)
        trainer = MixtureTrainer(options)

        def point(state: Any, recent: Sequence[MixtureLosses]) -> dict[str, object]:
            means = jax.tree.map(lambda *each: np.mean([np.asarray(x) for x in each], axis=0), *recent)
            now = trainer.judge(state.weights, judged[: cfg.train.judged])
            return {
                "loss": float(means.loss), "held_out": float(now.loss), "balance": float(now.balance),
                "rarest": float(now.share_LE.min()) * options.experts,
            }  # fmt: skip

        log = Log(
            folder / STATE, options.steps, own.save_every, "tokens", count=lambda batch: batch[:, 1:].size, point=point,
            publish=lambda point: ctx.tracker.point(TRAINING, point),
        )  # fmt: skip
        state = trainer.start()
        state = log.resume(state) or state
        with log.shown(ctx.console, "training", state) as on_step:
            state = trainer.run(state, train, on_step=on_step)
        path = mixture.write_mixture(options, state.weights, keys, folder / FILE, own.quantise)
        prompts = ({"id": str(i), "task": "held-out", "text": d.text[: own.prompt]} for i, d in enumerate(held))
        write_atomically(folder / PROMPTS, "".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
        names = ("step", "tokens", *DEFINITIONS)
        rows = [[f"{p[n]:.3f}" if n in DEFINITIONS else str(p[n]) for n in names] for p in log.curve]
        parameters = options.config.n_parameters
        return RunResult(
            {"model": str(path), "parameters": parameters, "training_tokens": train.shape[0] * options.rows,
             "curve": log.curve},
            path,
            shown=[
                Text(f"a mixture of {parameters / 1e6:.1f} million parameters on {train.size / 1e6:.2f} million tokens",
                     style="bold"),
                tables.new(*names, rows=rows, left=()),
                f"model: {path}; python -m specsparse.run +experiment=experts_union",
            ],
            figures=[Rows("curve", log.curve)],
            trained=[path],
            definitions=DEFINITIONS,
            objective=-log.curve[-1]["held_out"],
        )  # fmt: skip
