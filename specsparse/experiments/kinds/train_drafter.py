"""`kind: train_drafter`: a head or a draft model, trained on text that the target writes, and how well it drafts.

Text, drafter and checkpoints lie in a directory that a later run goes on from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from rich.table import Table

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError, refuse
from specsparse.experiments.kind import RunContext, RunResult
from specsparse.experiments.kinds import train_settings
from specsparse.experiments.kinds.train_settings import STATE, TRAINING, Training, TrainSettings
from specsparse.models import catalogue
from specsparse.report.methods import Setting
from specsparse.report.plots import Rows
from specsparse.runtime.session import Request
from specsparse.speculative.drafters.heads.head import find, read_head
from specsparse.speculative.drafters.heads.published import matrix_type
from specsparse.support import tables
from specsparse.support.options import Count, Range
from specsparse.training import corpus
from specsparse.training.corpus import DataOptions, read_documents, tokenised
from specsparse.training.dflash_form import DFlashForm, DSparkForm
from specsparse.training.eagle_form import Eagle3Form, HeadForm
from specsparse.training.form import Form, SmallForm, SmallOptions
from specsparse.training.trainer import DraftQuality, HeadLosses, Trainer, TrainOptions, TrainState, evaluator
from specsparse.training.training_loop import Log

DEFINITIONS = {
    "agreement": "held-out greedy answers: drafts whose token at a place is the answer's, of those right so far",
    "text": "answers' tokens in all, how many a second this run wrote, 0 where it wrote none, and tokens of documents",
    "acceptance": "1 + tokens right before the first wrong one, over drafts begun at every position of those answers; "
    "on the curve, of the drafter as it was at that step",
    "live": "the same over the drafts that decoding begins, where the round before has ended",
    "loss": "train.loss on the step's candidates, by place in the draft: KL(target, drafter) in nats unless another is "
    "given; of dspark kl_tv and the cross entropy of its confidence",
}


@dataclass(frozen=True)
class OwnOptions:
    """Options beside those of text and training; see conf/experiment/train_drafter.yaml."""

    form: Literal["head", "eagle3", "dflash", "dspark", "model"] = "head"
    below: tuple[Annotated[int, Range(0)], ...] = ()
    begin: str | None = None
    texts: str | None = None
    documents: tuple[str, ...] = ()
    gamma: Count = 4
    save_every: Count = 25


BLOCKS = {"dflash": DFlashForm, "dspark": DSparkForm}
OWNERS = (OwnOptions, DataOptions, TrainOptions, SmallOptions)
"""The keys of `train` belong to these."""


@dataclass(frozen=True)
class Trained:
    """The drafter's file, how well it drafts at every position and where decoding begins its drafts, and its form."""

    path: Path
    drafting: DraftQuality
    live: DraftQuality
    form: Form


class TrainDrafter(Training):
    """A head or a draft model for a model, trained on text that the model writes, and judged."""

    def check(self, cfg: TrainSettings) -> None:
        catalogue.resolve(cfg.model.path)
        own, _, train, _ = train_settings.options(cfg, *OWNERS)
        try:
            matrix_type(train.quantise)
        except UserError as error:
            raise UserError(f"train.quantise: {error}") from None
        for path in own.documents:
            read_documents(Path(path))
        cfg.data.prompts()

    def run(self, cfg: TrainSettings, ctx: RunContext) -> RunResult:
        """Writes text, trains, exports, judges; each goes on if an earlier run of the same output was stopped.

        Steps, their rates, documents and the amount of text may change between two runs; nothing else may.
        """
        model = ctx.load(cfg.model)
        own, data, train, small = train_settings.options(cfg, *OWNERS)
        made = form_of(cfg, model)  # its errors before the folder is claimed and the text is written
        end = {"head": "", "model": "-draft"}.get(own.form, f"-{own.form}")
        folder = Path(cfg.train.output or Path("heads") / f"{Path(model.path).stem}{end}")
        shape: dict[str, object] = {n: getattr(train, n) for n in ("draft_vocab", "seed")}
        shape |= asdict(small) if own.form == "model" else {"below": own.below, "begin": own.begin}
        shape |= {"streams": train.streams} if own.form in BLOCKS else {}
        shape |= {"loss": train.loss} if train.loss else {}
        train_settings.claim(folder, cfg, model, {"text": vars(data), own.form: shape})
        ctx.tracker.follow(folder)
        found, written = texts(cfg, model, folder, ctx)
        trainer = Trainer(model, train, made)
        judge = evaluator(
            model, trainer.form, held_out(cfg, model, ctx), gamma=own.gamma, shape=(train.rows, train.drafting)
        )

        def point(state: TrainState, recent: Sequence[HeadLosses]) -> dict[str, object]:
            means = [np.mean([np.asarray(x) for x in each], axis=0).tolist() for each in zip(*recent, strict=True)]
            judged = judge(trainer.written(state), frozen)
            acceptance = {"acceptance": judged.every.acceptance, "live": judged.live.acceptance}
            return dict(zip(HeadLosses._fields, means)) | trainer.rate(state) | acceptance  # no losses before step 1

        log = Log(
            folder / STATE, train.steps, own.save_every, "rows",
            count=lambda batch: int((batch.windows.depth >= 0).sum()), point=point,
            publish=lambda point: ctx.tracker.point(TRAINING, row_of(point)),
        )  # fmt: skip
        resumed = log.resume(trainer.start(None))
        state = resumed or trainer.start(found)
        frozen = trainer.frozen(np.asarray(state.ids))
        with log.shown(ctx.console, "training", state) as on_step:
            if resumed is None:
                log.add(0, state)
            state = trainer.run(state, found, on_step=on_step)
        ids, form = np.asarray(state.ids), trainer.form
        stem = folder.name.removesuffix(f"-{form.name}")  # the form behind it, once
        path = form.write(folder / f"{stem}-{form.name}.gguf", state.weights, ids, quant=train.quantise)
        drafting, live = judge(trainer.written(state), frozen)
        figures = {"drafting": asdict(drafting), "live": asdict(live), "curve": list(log.curve)}
        summary = {form.name: str(path), "bytes": path.stat().st_size, "text": written, **figures}
        return RunResult(
            summary,
            Trained(path, drafting, live, form),
            shown=[
                table([summary]),
                f"{form.name}: {path}; drafter={form.drafter} drafter.{form.option}={path}",
            ],
            figures=[Rows("curve", [row_of(point) for point in log.curve])],
            trained=[path],
            definitions=DEFINITIONS,
            objective=drafting.acceptance,
        )


def table(found: Sequence[Mapping[str, Any]], settings: Sequence[Setting] = ()) -> Table:
    """Two rows a drafter: drafts begun at every position, and where decoding begins them.

    Args:
        found: the summaries of trainings.
        settings: what differs between these.
    """
    places = max(len(summary["live"]["agreement"]) for summary in found)
    names = [*(setting.name for setting in settings), "file, MB", "drafts begun"]
    head = (*names, *(str(i + 1) for i in range(places)), "acceptance length", "drafts")
    note = "agreement on held-out greedy answers: how often each token of a draft is right, if those before it were"
    out = tables.new(*head, left=(*range(len(settings)), len(names) - 1), close=bool(settings), note=note)
    for i, summary in enumerate(found):
        about = [*(setting.values[i] for setting in settings), f"{summary['bytes'] / 1e6:.1f}"]
        for key, where in (("drafting", "at every position"), ("live", "where decoding begins them")):
            one = summary[key]
            right = [f"{a:.3f}" for a in one["agreement"]] + ["-"] * (places - len(one["agreement"]))
            out.add_row(*about, where, *right, f"{one['acceptance']:.2f}", str(one["tokens"]))
            about = [""] * len(about)
    return out


def row_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point of the curve with a column for each place in the draft."""
    row: dict[str, Any] = {}
    for key, value in point.items():
        row |= {f"{key}_{i}": x for i, x in enumerate(value, 1)} if isinstance(value, list) else {key: value}
    return row


def held_out(cfg: TrainSettings, model: Model, ctx: RunContext) -> list[corpus.Text]:
    """Greedy answers to the last `train.judged` prompts of each task of `data` that are short enough."""
    _, data, *_ = train_settings.options(cfg, *OWNERS)
    by_task: dict[str, list[Any]] = {}
    for prompt in cfg.data.prompts():
        ids = corpus.encode(model, prompt.text, chat=data.chat)
        if len(ids) <= data.prompt_tokens:
            by_task.setdefault(prompt.task, []).append(ids)
    kept = [ids for found in by_task.values() for ids in found[-cfg.train.judged :]]
    if not kept:
        raise UserError(f"no held-out prompt has at most {data.prompt_tokens} tokens: raise train.prompt_tokens")
    params, answers = SamplingParams(temperature=0.0, max_tokens=data.answer), []
    with ctx.counting("answering held-out prompts", len(kept)) as step:
        for start in range(0, len(kept), data.batch):
            part = kept[start : start + data.batch]
            answers += corpus.answer(model, [Request(ids, params, cfg.seed) for ids in part])
            step(len(answers))
    return answers


def form_of(cfg: TrainSettings, model: Model) -> Form:
    """The form that is trained. UserError: an option of another form, or layers that the target has not."""
    own, _, train, small = train_settings.options(cfg, *OWNERS)
    below, block, n_layers = list(own.below), train.streams, model.config.n_layers
    refuse({
        "train.below belongs to train.form=head, eagle3, dflash and dspark": own.form == "model" and below,
        "train.begin belongs to train.form=head": own.form != "head" and own.begin is not None,
        f"train.below={below} must be ascending ids of layers under {n_layers}":
            below != sorted(set(below)) or any(i >= n_layers for i in below),
        f"train.below=[]: {model.path} has only {n_layers} layers; name those that it reads":
            own.form in ("eagle3", *BLOCKS) and not below and n_layers < 4,
        f"train.gamma={own.gamma}: a block of train.streams={block} tokens has no more; raise streams":
            own.form in BLOCKS and own.gamma > block,
    })  # fmt: skip
    if own.form == "model":
        return SmallForm(model, small, cfg.seed)
    if own.form == "head":
        file = None if own.begin is None else find(own.begin, model.params.output_norm)
        return HeadForm(model, own.below, None if file is None else read_head(file, model.config, floats=True))
    return Eagle3Form(model, own.below) if own.form == "eagle3" else BLOCKS[own.form](model, own.below, block)


def texts(
    cfg: TrainSettings, model: Model, folder: Path, ctx: RunContext
) -> tuple[list[corpus.Text], dict[str, object]]:
    """Answers of `train.tokens` tokens, made if they are not there yet, and the documents beside them; and their
    numbers for the record, see `DEFINITIONS`."""
    own, data, *_ = train_settings.options(cfg, *OWNERS)
    read = tokenised(model, [document for path in own.documents for document in read_documents(Path(path))], data)
    found, written = train_settings.own_texts(cfg, data, model, Path(own.texts or folder / "texts"), ctx)
    return found + read, {**asdict(written), "documents": sum(len(text.tokens) - text.prompt for text in read)}
