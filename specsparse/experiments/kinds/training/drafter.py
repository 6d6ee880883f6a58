"""`kind: train_drafter`: a head or a draft model, trained on text that the target writes, and how well it drafts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments.kind import Found, Lab
from specsparse.experiments.kinds.training import drafter_fit as training
from specsparse.experiments.kinds.training.options import Training, TrainSettings
from specsparse.models import catalogue
from specsparse.report.plots import Rows
from specsparse.speculative.drafters.heads.published_file import matrix_type
from specsparse.support import terminal
from specsparse.support.tables import new
from specsparse.training import corpus
from specsparse.training.form import Form
from specsparse.training.trainer import DraftQuality, evaluate

DEFINITIONS = {
    "agreement": "held-out greedy answers: drafts whose token at a place is the answer's, of those right so far",
    "text": "answers' tokens in all, how many a second this run wrote, 0 where it wrote none, and tokens of documents",
    "acceptance": "1 + tokens right before the first wrong one, over drafts begun at every position of those answers",
    "loss": "KL(target, drafter) in nats on the step's candidates, by place in the draft",
}


@dataclass(frozen=True)
class Trained:
    """What came out."""

    path: Path
    drafting: DraftQuality
    form: Form


class TrainDrafter(Training):
    """A head or a draft model for a model, trained on text that the model writes, and judged."""

    def check(self, cfg: TrainSettings) -> None:
        """Options, files and prompts."""
        catalogue.resolve(cfg.model.path)
        own = training.Options.of(cfg).own
        try:
            matrix_type(own.quantise)
        except UserError as error:
            raise UserError(f"train.quantise: {error}") from None
        training.documents(cfg)
        cfg.data.prompts()

    def run(self, cfg: TrainSettings, lab: Lab) -> Found:
        """Writes text, trains, exports, judges; each of these goes on where an earlier run of the same output stopped.

        Raises:
            UserError: another training's output directory, or text without answers.
        """
        console, model = lab.console, lab.load(cfg.model)
        chosen, folder = training.Options.of(cfg), training.folder_of(cfg, model)
        training.claim(folder, cfg, model)
        found, written = training.texts(cfg, model, folder, console)
        state, trainer, curve = training.trained(cfg, model, folder, found, console)
        ids, form = np.asarray(state.ids), trainer.form
        stem = folder.name.removesuffix(f"-{form.name}")  # the form behind it, once
        path = form.write(folder / f"{stem}-{form.name}.gguf", state.weights, ids, quant=chosen.own.quantise)
        shape, gamma = (chosen.train.rows, chosen.train.drafting), chosen.own.gamma
        answers = held_out(cfg, model, console)
        drafting = evaluate(model, form, state.weights, trainer.frozen(ids), answers, gamma=gamma, shape=shape)
        return Found(
            {form.name: str(path), "text": asdict(written), "drafting": asdict(drafting), "curve": list(curve)},
            Trained(path, drafting, form),
            shown=[
                Text("held-out greedy answers: how often each token of a draft is right", style="bold"),
                _table(drafting),
                Text(f"{form.name}: {path}; drafter={form.drafter} drafter.{form.option}={path}"),
            ],
            figures=[Rows("curve", [_row(point) for point in curve])],
            definitions=DEFINITIONS,
            objective=drafting.acceptance,
        )


def _row(point: Mapping[str, Any]) -> dict[str, object]:
    """A checkpoint of the curve, a pair of columns a place in the draft."""
    pairs = zip(point["loss"], point["agreement"], strict=True)
    places = {f"{key}_{i}": x for i, pair in enumerate(pairs, 1) for key, x in zip(("loss", "agreement"), pair)}
    return {**{key: point[key] for key in ("step", "rows", "seconds", "rate")}, **places}


def held_out(cfg: TrainSettings, model: Model, console: Console) -> list[corpus.Text]:
    """Greedy answers to the last `train.judged` prompts of each task of `data` that are short enough."""
    chosen = training.Options.of(cfg).data
    source = cfg.data.prompts()
    encoded = [(p.task, corpus.encode(model, p.text, chat=chosen.chat)) for p in source]
    short = [(task, ids) for task, ids in encoded if len(ids) <= chosen.prompt_tokens]
    tasks = dict.fromkeys(task for task, _ in short)
    kept = [ids for task in tasks for ids in [i for t, i in short if t == task][-cfg.train.judged :]]
    if not kept:
        raise UserError(f"no held-out prompt has at most {chosen.prompt_tokens} tokens: raise train.prompt_tokens")
    params = SamplingParams(temperature=0.0, max_tokens=chosen.answer)
    answers = []
    with terminal.counting(console, "answering held-out prompts", len(kept)) as bar:
        for start in range(0, len(kept), chosen.batch):
            part = kept[start : start + chosen.batch]
            answers += corpus.answer(model, part, [params] * len(part), seed=cfg.seed)
            bar.advance(bar.task_ids[0], len(part))
    return answers


def _table(drafting: DraftQuality) -> Table:
    table = new("place", *(str(i + 1) for i in range(len(drafting.agreement))), "acceptance length", "drafts")
    row = [f"{a:.3f}" for a in drafting.agreement]
    table.add_row("agreement", *row, f"{drafting.acceptance:.2f}", str(drafting.tokens))
    return table
