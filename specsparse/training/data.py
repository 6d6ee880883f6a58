"""What drafters are trained on: the target's answers to generated prompts, as token ids in files that a restart finds
again."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.device_batch import Request
from specsparse.runtime.method import Method
from specsparse.runtime.session import Session
from specsparse.support.files import read_tensors, write_tensors
from specsparse.support.options import Count, Internal, Range
from specsparse.training.prompts import prompt

_ROUNDS = 24
"""Tokens between two looks at how many answers still go on."""


@dataclass(frozen=True)
class DataOptions:
    """What text is made.

    Attributes:
        batch: prompts answered together, of like lengths.
        batches: of a file.
        answer: tokens of an answer, at most.
        least: answers that still go on when a batch ends, as a share of it: the last ones would be written alone.
        prompt_tokens: longer prompts are left out.
        temperatures: of the answers, in turn; 0 is greedy.
        chat: each prompt is a user's turn in the model's template.
        seed: of prompts and answers.
    """

    batch: Count = 16
    batches: Count = 8
    answer: Count = 240
    least: Annotated[float, Range(0, 1)] = 0.2
    prompt_tokens: Count = 256
    temperatures: tuple[Annotated[float, Range(0)], ...] = (0.0, 0.7, 0.0, 1.0)
    chat: Annotated[bool, Internal()] = True
    seed: Annotated[int, Internal()] = 0

    def __post_init__(self):
        if not self.temperatures:
            raise UserError("train.temperatures=[]: at least one is needed")


@dataclass(frozen=True)
class Text:
    """One answered prompt.

    Attributes:
        tokens: int32[n], prompt and answer.
        prompt: tokens of the prompt.
        hidden: float32[n, W], the target's rows at these tokens, where `training.features` made them.
    """

    tokens: np.ndarray
    prompt: int
    hidden: np.ndarray | None = None


def answer(
    model: Model, prompts: list[np.ndarray], params: list[SamplingParams], *, seed: int, least: float = 0.0
) -> list[Text]:
    """The model's answers to prompts of token ids, decoded together; plain decoding's tokens.

    Args:
        model: the target.
        prompts: int32[n] each.
        params: of each.
        seed: of the draws, with a prompt's place among the prompts.
        least: all end when no larger share of them goes on.
    """
    sequences = [Request(p, s, seed, i) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    session = Session(model, sequences, Method())
    while sum(f is Finish.RUNNING for f in session.finish) > least * len(sequences):
        session.advance(_ROUNDS)
    return [
        Text(np.concatenate([ids, out]).astype(np.int32), len(ids))
        for ids, out in zip(prompts, session.tokens(), strict=True)
    ]


def encode(model: Model, text: str, *, chat: bool) -> np.ndarray:
    """Ids int32[n] of a prompt's text."""
    tokenizer = model.tokenizer
    if chat:
        turn = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return np.asarray(tokenizer.encode(turn, parse_special=True), np.int32)
    return np.asarray(tokenizer.encode(text, add_special=True), np.int32)


def make_shard(model: Model, options: DataOptions, index: int) -> list[Text]:
    """The answers of file `index`: the same whenever and in whatever order files are made."""
    count = options.batch * options.batches
    limit = min(options.prompt_tokens, model.config.context_length - 2)
    tries, prompts = iter(range(1000 * count)), []
    while len(prompts) < count:
        source = prompt(index * 1000 * count + _next(tries, limit), seed=options.seed)
        ids = encode(model, source.text, chat=options.chat)
        if 0 < len(ids) <= limit:
            prompts.append(ids)
    laws = itertools.cycle([SamplingParams(temperature=t, max_tokens=options.answer) for t in options.temperatures])
    both = sorted(zip(prompts, laws), key=lambda pair: len(pair[0]))  # a batch computes rows up to its longest prompt
    texts = []
    for number, start in enumerate(range(0, count, options.batch)):
        ids, params = (list(x) for x in zip(*both[start : start + options.batch], strict=True))
        seed = options.seed * 1_000_003 + index * options.batches + number
        texts += answer(model, ids, params, seed=seed, least=options.least)
    return texts


def _next(tries: Iterator[int], limit: int) -> int:
    number = next(tries, None)
    if number is None:
        raise UserError(f"no generated prompt has at most {limit} tokens: raise train.prompt_tokens")
    return number


def shard_path(folder: Path, index: int) -> Path:
    """The file of shard `index`."""
    return folder / f"texts_{index:05d}.safetensors"


def write_shard(path: Path, texts: list[Text]) -> None:
    """Writes the ids of texts end to end; the file appears whole or not at all."""
    tokens = np.concatenate([t.tokens for t in texts])
    tensors = {
        "tokens": tokens.astype(np.uint16 if tokens.max(initial=0) < 1 << 16 else np.int32),
        "lengths": np.array([len(t.tokens) for t in texts], np.int32),
        "prompts": np.array([t.prompt for t in texts], np.int32),
    }
    write_tensors(path, tensors, {"format": "specsparse.training.texts"})


def read_shard(path: Path) -> list[Text]:
    """What `write_shard` wrote.

    Raises:
        UserError: no such file, or a damaged one.
    """
    tensors, meta = read_tensors(path)
    found = [tensors.get(name) for name in ("tokens", "lengths", "prompts")]
    if meta.get("format") != "specsparse.training.texts" or any(x is None or x.ndim != 1 for x in found):
        raise UserError(f"{path}: holds no texts to train on; remove it to have it made again")
    tokens, lengths, prompts = (np.asarray(x, np.int32) for x in found)
    if len(lengths) != len(prompts) or lengths.sum() != len(tokens) or (prompts > lengths).any() or (prompts < 1).any():
        raise UserError(f"{path}: its texts do not fit their lengths; remove it to have it made again")
    ends = np.cumsum(lengths)
    return [Text(tokens[a:b], int(p)) for a, b, p in zip(ends - lengths, ends, prompts, strict=True)]


@dataclass(frozen=True)
class TextWritten:
    """How far the text is: answers' tokens in all, and a second while text was written, 0 before that."""

    tokens: int
    tokens_per_s: float


def generate(
    model: Model,
    options: DataOptions,
    folder: Path,
    *,
    tokens: int,
    progress: Callable[[TextWritten], None] | None = None,
) -> list[Path]:
    """Makes shards in `folder` until their answers hold `tokens` tokens; those that are there are not made again.

    Args:
        model: the target.
        options: what text.
        folder: made if it is not there.
        tokens: of answers, at least.
        progress: called after each shard.

    Returns:
        The files, in order.
    """
    paths, done, made, spent = [], 0, 0, 0.0
    while done < tokens:
        path, before = shard_path(folder, len(paths)), time.perf_counter()
        is_new = not path.exists()
        if is_new:
            write_shard(path, make_shard(model, options, len(paths)))
        count = sum(len(text.tokens) - text.prompt for text in read_shard(path))
        if is_new:
            made, spent = made + count, spent + time.perf_counter() - before
        done += count
        paths.append(path)
        if progress is not None:
            progress(TextWritten(done, made / spent if spent else 0.0))
    return paths
