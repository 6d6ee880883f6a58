"""What heads are trained on: the target's answers to generated prompts, with its features, in files that a restart
finds again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.device_batch import Method, Request
from specsparse.runtime.session import Session
from specsparse.speculative.verify import VERIFIERS
from specsparse.support.options import Count, Internal, Range
from specsparse.support.tensor_files import read_tensors, write_tensors
from specsparse.training.prompts import prompt
from specsparse.training.recorder import HiddenRecorder


@dataclass(frozen=True)
class DataOptions:
    """What text is made.

    Attributes:
        batch: prompts answered together, and in one file.
        answer: tokens of an answer, at most.
        prompt_tokens: longer prompts are left out.
        temperatures: of the answers, in turn; 0 is greedy.
        chat: each prompt is a user's turn in the model's template.
        seed: of prompts and answers.
    """

    batch: Count = 24
    answer: Count = 224
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
        tokens: int32[n], prompt and answer; the token after them is not kept.
        hidden: float16[n, D], the target's rows before the output norm, one for each token.
        prompt: tokens of the prompt.
    """

    tokens: np.ndarray
    hidden: np.ndarray
    prompt: int


def answer(model: Model, prompts: list[np.ndarray], params: list[SamplingParams], *, seed: int) -> list[Text]:
    """The model's answers to prompts of token ids, decoded together; plain decoding's tokens."""
    sequences = [Request(p, s, seed, i) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    name = "greedy" if all(s.greedy for s in params) else "match"
    session = Session(model, sequences, Method(HiddenRecorder(model.config.d_model), VERIFIERS[name]))
    session.advance()
    hidden = np.asarray(session.state.drafter.rows)
    texts = []
    for b, (ids, out) in enumerate(zip(prompts, session.tokens(), strict=True)):
        tokens = np.concatenate([ids, out])[:-1].astype(np.int32)
        texts.append(Text(tokens, hidden[b, : len(tokens)], len(ids)))
    return texts


def encode(model: Model, text: str, *, chat: bool) -> np.ndarray:
    """Ids int32[n] of a prompt's text."""
    tokenizer = model.tokenizer
    if chat:
        turn = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return np.asarray(tokenizer.encode(turn, parse_special=True), np.int32)
    return np.asarray(tokenizer.encode(text, add_special=True), np.int32)


def make_shard(model: Model, options: DataOptions, index: int) -> list[Text]:
    """Answers number `index * batch` and so on: the same whenever and in whatever order they are made."""
    prompts, number = [], index * options.batch
    limit = min(options.prompt_tokens, model.config.context_length - 2)
    tries = iter(range(1000 * options.batch))
    while len(prompts) < options.batch:
        source = prompt(index * 1000 * options.batch + _next(tries, limit), seed=options.seed)
        ids = encode(model, source.text, chat=options.chat)
        if 0 < len(ids) <= limit:
            prompts.append(ids)
    params = [
        SamplingParams(
            temperature=options.temperatures[(number + i) % len(options.temperatures)], max_tokens=options.answer
        )
        for i in range(options.batch)
    ]
    return answer(model, prompts, params, seed=options.seed * 1_000_003 + index)


def _next(tries: Iterator[int], limit: int) -> int:
    number = next(tries, None)
    if number is None:
        raise UserError(f"no generated prompt has at most {limit} tokens: raise train.prompt_tokens")
    return number


def shard_path(folder: Path, index: int) -> Path:
    """The file of shard `index`."""
    return folder / f"texts_{index:05d}.safetensors"


def write_shard(path: Path, texts: list[Text]) -> None:
    """Writes texts end to end; the file appears whole or not at all."""
    tensors = {
        "tokens": np.concatenate([t.tokens for t in texts]),
        "hidden": np.concatenate([t.hidden for t in texts]),
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
    if meta.get("format") != "specsparse.training.texts":
        raise UserError(f"{path}: holds no texts to train on; remove it to have it made again")
    ends = np.cumsum(tensors["lengths"])
    starts = ends - tensors["lengths"]
    return [
        Text(tensors["tokens"][a:b], tensors["hidden"][a:b], int(p))
        for a, b, p in zip(starts, ends, tensors["prompts"], strict=True)
    ]


def generate(
    model: Model, options: DataOptions, folder: Path, *, tokens: int, progress: Callable[[int], None] | None = None
) -> list[Path]:
    """Makes shards in `folder` until their answers hold `tokens` tokens; those that are there are not made again.

    Args:
        model: the target.
        options: what text.
        folder: made if it is not there.
        tokens: of answers, at least.
        progress: called with the tokens so far after each shard.

    Returns:
        The files, in order.
    """
    paths, done = [], 0
    while done < tokens:
        path = shard_path(folder, len(paths))
        if not path.exists():
            write_shard(path, make_shard(model, options, len(paths)))
        texts, _ = read_tensors(path)
        done += int(texts["lengths"].sum() - texts["prompts"].sum())
        paths.append(path)
        if progress is not None:
            progress(done)
    return paths
