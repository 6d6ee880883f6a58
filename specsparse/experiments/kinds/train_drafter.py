"""`kind: train_drafter`: a head or a draft model, trained on text that the target writes, and how well it drafts.

Text, drafter and checkpoints lie in a directory that a later run goes on from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments.kind import RunContext, RunResult
from specsparse.experiments.kinds import train_settings
from specsparse.experiments.kinds.train_settings import Training, TrainKeys, TrainSettings
from specsparse.models import catalogue
from specsparse.report.plots import Rows
from specsparse.speculative.drafters.heads.head import find, read_head
from specsparse.speculative.drafters.heads.published import matrix_type
from specsparse.support import terminal
from specsparse.support.options import Count, Range
from specsparse.support.tables import new
from specsparse.training import corpus
from specsparse.training.corpus import (
    DataOptions,
    Document,
    TextWritten,
    generate,
    read_documents,
    read_shard,
    tokenised,
)
from specsparse.training.dflash_form import DFlashForm
from specsparse.training.eagle_form import Eagle3Form, HeadForm
from specsparse.training.form import Form, SmallForm, SmallOptions
from specsparse.training.trainer import DraftQuality, HeadLosses, Trainer, TrainOptions, TrainState, evaluate
from specsparse.training.training_loop import Log

DEFINITIONS = {
    "agreement": "held-out greedy answers: drafts whose token at a place is the answer's, of those right so far",
    "text": "answers' tokens in all, how many a second this run wrote, 0 where it wrote none, and tokens of documents",
    "acceptance": "1 + tokens right before the first wrong one, over drafts begun at every position of those answers",
    "loss": "KL(target, drafter) in nats on the step's candidates, by place in the draft",
}
_TEXTS, _STATE = "texts", "state.safetensors"


@dataclass(frozen=True)
class OwnOptions:
    """What is neither the target's own text nor training; see conf/experiment/train_drafter.yaml."""

    form: Literal["head", "eagle3", "dflash", "model"] = "head"
    below: tuple[Annotated[int, Range(0)], ...] = ()
    begin: str | None = None
    texts: str | None = None
    documents: tuple[str, ...] = ()
    gamma: Count = 4
    save_every: Count = 25
    quantise: str = "Q8_0"


@dataclass(frozen=True)
class Options(TrainKeys):
    """The keys of `train`, by what they belong to."""

    own: OwnOptions
    data: DataOptions
    train: TrainOptions
    small: SmallOptions


@dataclass(frozen=True)
class TextSeen(TextWritten):
    """What there is to train on: `TextWritten`, and the tokens of documents."""

    documents: int


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
        own = Options.of(cfg).own
        try:
            matrix_type(own.quantise)
        except UserError as error:
            raise UserError(f"train.quantise: {error}") from None
        documents(cfg)
        cfg.data.prompts()

    def run(self, cfg: TrainSettings, ctx: RunContext) -> RunResult:
        """Writes text, trains, exports, judges; each of these goes on where an earlier run of the same output stopped.

        Raises:
            UserError: another training's output directory, or text without answers.
        """
        console, model = ctx.console, ctx.load(cfg.model)
        chosen, folder = Options.of(cfg), folder_of(cfg, model)
        claim(folder, cfg, model)
        found, written = texts(cfg, model, folder, console)
        state, trainer, curve = trained(cfg, model, folder, found, console)
        ids, form = np.asarray(state.ids), trainer.form
        stem = folder.name.removesuffix(f"-{form.name}")  # the form behind it, once
        path = form.write(folder / f"{stem}-{form.name}.gguf", state.weights, ids, quant=chosen.own.quantise)
        shape, gamma = (chosen.train.rows, chosen.train.drafting), chosen.own.gamma
        answers = held_out(cfg, model, console)
        drafting = evaluate(model, form, state.weights, trainer.frozen(ids), answers, gamma=gamma, shape=shape)
        return RunResult(
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
    chosen = Options.of(cfg).data
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


def folder_of(cfg: TrainSettings, model: Model) -> Path:
    """Where a training keeps its files."""
    end = {"head": "", "model": "-draft"}.get(Options.of(cfg).own.form, f"-{Options.of(cfg).own.form}")
    return Path(cfg.train.output or Path("heads") / f"{Path(model.path).stem}{end}")


def form_of(cfg: TrainSettings, model: Model) -> Form:
    """What is trained.

    Raises:
        UserError: an option of another form, or layers that the target has not.
    """
    found, n_layers = Options.of(cfg), model.config.n_layers
    own = found.own
    if own.form == "model" and own.below:
        raise UserError("train.below belongs to train.form=head, eagle3 and dflash")
    if own.form != "head" and own.begin is not None:
        raise UserError("train.begin belongs to train.form=head")
    if list(own.below) != sorted(set(own.below)) or any(i >= n_layers for i in own.below):
        raise UserError(f"train.below={list(own.below)} must be ascending ids of layers under {n_layers}")
    if own.form == "model":
        return SmallForm(model, found.small, cfg.seed)
    if own.form == "head":
        file = None if own.begin is None else find(own.begin, model.params.output_norm)
        form = HeadForm(model, own.below, file and read_head(file, model.config, floats=True))
        form.check()
        return form
    if not own.below and n_layers < 4:
        raise UserError(f"train.below=[]: {model.path} has only {n_layers} layers; name those that it reads")
    if own.form == "eagle3":
        return Eagle3Form(model, own.below)
    block = found.train.streams
    if own.gamma > block:
        raise UserError(f"train.gamma={own.gamma}: a block of train.streams={block} tokens has no more; raise streams")
    return DFlashForm(model, own.below, block)


def claim(folder: Path, cfg: TrainSettings, model: Model) -> None:
    """Makes the directory this training's, or finds that it is already.

    The number of steps, their rates, documents and the amount of text may change between two runs; nothing else may.

    Raises:
        UserError: it holds another training.
    """
    found = Options.of(cfg)
    shape: dict[str, object] = {n: getattr(found.train, n) for n in ("draft_vocab", "seed")}
    text = {f.name: getattr(found.data, f.name) for f in fields(found.data)}
    if found.own.form == "model":
        shape |= asdict(found.small)
    else:
        shape |= {"below": found.own.below, "begin": found.own.begin}
    if found.own.form == "dflash":
        shape["streams"] = found.train.streams
    train_settings.claim(folder, {
        "model": train_settings.identity(model, cfg.model.overrides()), "text": text, found.own.form: shape,
    })  # fmt: skip


def documents(cfg: TrainSettings) -> list[Document]:
    """What the files of `train.documents` hold.

    Raises:
        UserError: a file that is not there, is malformed or holds no text.
    """
    return [document for path in Options.of(cfg).own.documents for document in read_documents(Path(path))]


def texts(cfg: TrainSettings, model: Model, folder: Path, console: Console) -> tuple[list[corpus.Text], TextSeen]:
    """Answers of `train.tokens` tokens, made where they are not there yet, and the documents beside them."""
    wanted, chosen = cfg.train.tokens, Options.of(cfg)
    written = TextWritten(0, 0.0)
    read = tokenised(model, documents(cfg), chosen.data)
    with terminal.counting(console, "writing text", wanted) as bar:

        def progress(found: TextWritten) -> None:
            nonlocal written
            written = found
            what = f"writing text, {found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else "reading text"
            bar.update(bar.task_ids[0], completed=min(found.tokens, wanted), description=what)

        where = Path(chosen.own.texts or folder / _TEXTS)
        paths = generate(model, chosen.data, where, tokens=wanted, progress=progress)
    seen = TextSeen(written.tokens, written.tokens_per_s, sum(len(text.tokens) - text.prompt for text in read))
    return [text for path in paths for text in read_shard(path)] + read, seen


def trained(
    cfg: TrainSettings, model: Model, folder: Path, found: list[corpus.Text], console: Console
) -> tuple[TrainState, Trainer, list[dict[str, Any]]]:
    """The state after the last step, its trainer, and the curve: losses and tokens seen at each checkpoint."""
    chosen = Options.of(cfg)
    trainer = Trainer(model, chosen.train, form_of(cfg, model))
    log = Log(
        folder / _STATE, chosen.train.steps, chosen.own.save_every, "rows",
        count=lambda batch: int((batch.windows.depth >= 0).sum()), point=_point,
    )  # fmt: skip
    state = log.resume(trainer.like())
    if state is None:
        state = trainer.start(found)
    with log.shown(console, "training", state) as on_step:
        state = trainer.run(state, found, on_step=on_step)
    return state, trainer, log.curve


def _point(_: TrainState, recent: Sequence[HeadLosses]) -> dict[str, object]:
    """Mean losses since the point before."""
    loss, agreement = (np.mean([np.asarray(x) for x in each], axis=0).tolist() for each in zip(*recent, strict=True))
    return {"loss": loss, "agreement": agreement}
