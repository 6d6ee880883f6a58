"""Text, drafter and checkpoints in a directory that a later run goes on from."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from rich.console import Console

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.experiments.kinds.training import folder as folders
from specsparse.experiments.kinds.training.options import TrainKeys, TrainSettings
from specsparse.speculative.drafters.heads.head_file import find, read_head
from specsparse.support import terminal
from specsparse.support.options import Count, Range
from specsparse.training.corpus import (
    DataOptions,
    Document,
    Text,
    TextWritten,
    generate,
    read_documents,
    read_shard,
    tokenised,
)
from specsparse.training.dflash_form import DFlashForm
from specsparse.training.eagle_form import Eagle3Form, HeadForm
from specsparse.training.form import Form
from specsparse.training.small_form import SmallForm, SmallOptions
from specsparse.training.trainer import HeadLosses, Trainer, TrainOptions, TrainState
from specsparse.training.training_loop import Log

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
    folders.claim(folder, {
        "model": folders.identity(model, cfg.model.overrides()), "text": text, found.own.form: shape,
    })  # fmt: skip


def documents(cfg: TrainSettings) -> list[Document]:
    """What the files of `train.documents` hold.

    Raises:
        UserError: a file that is not there, is malformed or holds no text.
    """
    return [document for path in Options.of(cfg).own.documents for document in read_documents(Path(path))]


def texts(cfg: TrainSettings, model: Model, folder: Path, console: Console) -> tuple[list[Text], TextSeen]:
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
    cfg: TrainSettings, model: Model, folder: Path, found: list[Text], console: Console
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
