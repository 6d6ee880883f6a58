"""The text that drafters are trained on, as token ids: the target's answers to generated prompts, and documents.

Prompts are a small grammar expanded at random, over the tasks of the built-in prompts. Answers stand in files that a
restart finds again. Texts get the target's rows (`Features`), and are packed side by side into windows of one shape, so
that one program serves them all.

The loss at a token is the divergence from the target's distribution there, whoever wrote the token. So a document
serves as well as a text of the target's making (EAGLE, arXiv:2401.15077, trains on fixed dialogues), and costs one
forward pass instead of its decoding.
"""

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.engine.generate import Finish
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.method import Method
from specsparse.runtime.session import Request, Session
from specsparse.support.files import read_tensors, write_tensors
from specsparse.support.options import Count, Internal, Range

_GRAMMAR_FILE = Path(__file__).parents[1] / "data" / "training_prompts.json"
_SLOT = re.compile(r"\{([a-z_-]+|\d+\.\.\d+)\}")
_DEEPEST = 12
_ROUNDS = 24
"""Tokens between two looks at how many answers still go on."""
_SHORTEST = 8
"""Tokens under which a part of a document says too little to be kept."""
_FORMAT = "specsparse.training.texts"
_BATCH, _STEP = 8, 128
"""Texts of a forward pass, and what its length is a multiple of: few shapes, so that few programs are compiled."""
_OPEN = 8
"""Windows that wait for a text that still fits."""


@dataclass(frozen=True)
class DataOptions:
    """The text to make.

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
        hidden: float32[n, W], the target's rows at these tokens, if `Features` made them.
    """

    tokens: np.ndarray
    prompt: int
    hidden: np.ndarray | None = None

    @property
    def read(self) -> np.ndarray:
        """`hidden` of a text that `Features` read."""
        assert self.hidden is not None
        return self.hidden


@functools.cache
def grammar() -> Mapping[str, Any]:
    """Rules by name; `tasks` maps each task to how often it comes. None of the built-in prompts is in them."""
    return json.loads(_GRAMMAR_FILE.read_text(encoding="utf-8"))


def prompt(index: int, *, seed: int = 0, rules: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """(task, text) of prompt number `index` of the endless list that belongs to `seed`.

    A rule's text holds slots: `{name}` is a text of that rule, `{2..9}` a whole number in that range. A rule that the
    rule `once` names gives one text throughout a prompt.
    """
    rules = grammar() if rules is None else rules
    rng, fixed = np.random.default_rng([seed, index]), {}

    def expand(text: str, depth: int) -> str:
        assert depth <= _DEEPEST, f"the grammar does not end: {text[:40]!r}"

        def fill(match: re.Match) -> str:
            slot = match[1]
            if ".." in slot:
                low, high = map(int, slot.split(".."))
                return str(rng.integers(low, high + 1))
            if slot in fixed:
                return fixed[slot]
            options = rules[slot]
            found = expand(options[int(rng.integers(len(options)))], depth + 1)
            if slot in rules.get("once", ()):
                fixed[slot] = found
            return found

        return _SLOT.sub(fill, text)

    tasks = rules["tasks"]
    share = np.array([tasks[name] for name in tasks], np.float64)
    task = str(rng.choice(list(tasks), p=share / share.sum()))
    return task, expand("{" + task + "}", 0)


def answer(
    model: Model, prompts: list[np.ndarray], params: list[SamplingParams], *, seed: int, least: float = 0.0
) -> list[Text]:
    """The model's answers to prompts of token ids, decoded together; plain decoding's tokens.

    `seed` is of the draws, with a prompt's place among the prompts. All end when no larger share than `least` goes on.
    """
    sequences = [Request(p, s, seed, i) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    session = Session(model, sequences, Method())
    while sum(f is Finish.RUNNING for f in session.finish) > least * len(sequences):
        session.advance(_ROUNDS)
    answered = zip(prompts, session.tokens(), strict=True)
    return [Text(np.concatenate([ids, out]).astype(np.int32), len(ids)) for ids, out in answered]


def encode(model: Model, text: str, *, chat: bool) -> np.ndarray:
    """int32[n]: a prompt's text, as a user's turn in the model's template if `chat`."""
    tokenizer = model.tokenizer
    if chat:
        turn = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return np.asarray(tokenizer.encode(turn, parse_special=True), np.int32)
    return np.asarray(tokenizer.encode(text, add_special=True), np.int32)


def make_shard(model: Model, options: DataOptions, index: int) -> list[Text]:
    """The answers of file `index`: the same whenever and in whatever order files are made. A UserError if hardly a
    prompt is short enough."""
    count = options.batch * options.batches
    limit = min(options.prompt_tokens, model.config.context_length - 2)
    numbers = range(index * 1000 * count, (index + 1) * 1000 * count)
    each = (encode(model, prompt(number, seed=options.seed)[1], chat=options.chat) for number in numbers)
    prompts = list(itertools.islice((ids for ids in each if 0 < len(ids) <= limit), count))
    if len(prompts) < count:
        raise UserError(f"no generated prompt has at most {limit} tokens: raise train.prompt_tokens")
    params = itertools.cycle([SamplingParams(temperature=t, max_tokens=options.answer) for t in options.temperatures])
    both = sorted(zip(prompts, params), key=lambda pair: len(pair[0]))  # a batch computes rows up to its longest prompt
    texts = []
    for number, start in enumerate(range(0, count, options.batch)):
        ids, params = (list(x) for x in zip(*both[start : start + options.batch], strict=True))
        seed = options.seed * 1_000_003 + index * options.batches + number
        texts += answer(model, ids, params, seed=seed, least=options.least)
    return texts


def write_shard(path: Path, texts: list[Text]) -> None:
    """Writes the ids of texts end to end; the file appears whole or not at all."""
    tokens = np.concatenate([t.tokens for t in texts])
    tensors = {
        "tokens": tokens.astype(np.uint16 if tokens.max(initial=0) < 1 << 16 else np.int32),
        "lengths": np.array([len(t.tokens) for t in texts], np.int32),
        "prompts": np.array([t.prompt for t in texts], np.int32),
    }
    write_tensors(path, tensors, {"format": _FORMAT})


def read_shard(path: Path) -> list[Text]:
    """The texts that `write_shard` wrote; UserError for no such file, or a damaged one."""
    tensors, meta = read_tensors(path)
    tokens, lengths, prompts = (np.asarray(tensors.get(name, 0), np.int32) for name in ("tokens", "lengths", "prompts"))
    whole = meta.get("format") == _FORMAT and tokens.ndim == lengths.ndim == prompts.ndim == 1
    whole = whole and len(lengths) == len(prompts) and lengths.sum() == len(tokens)
    whole = whole and (prompts <= lengths).all() and (prompts >= 1).all()
    if not whole:
        raise UserError(f"{path}: holds no texts to train on, or damaged ones; remove it to have it made again")
    ends = np.cumsum(lengths)
    return [Text(tokens[a:b], int(p)) for a, b, p in zip(ends - lengths, ends, prompts, strict=True)]


@dataclass(frozen=True)
class TextWritten:
    """Progress: answers' tokens in all, and tokens a second while text was written, 0 before that."""

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
    """Shards in `folder`, in order, whose answers hold at least `tokens` tokens; those that are there are not made
    again. `progress` is called after each."""
    paths, done, made, spent = [], 0, 0, 0.0
    while done < tokens:
        path, before = folder / f"texts_{len(paths):05d}.safetensors", time.perf_counter()
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


class Document(NamedTuple):
    """Running text; or an answer, with the user's turn before it."""

    text: str
    prompt: str | None = None


def read_documents(path: Path) -> list[Document]:
    """The documents of a file: one text; or, if its name ends in .jsonl, on each line an object with "text", or with
    "prompt" and "answer". A UserError if it cannot be read."""
    where, documents = path, []
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            documents.append(Document(text))
        for number, line in enumerate(text.split("\n") if path.suffix == ".jsonl" else (), 1):
            where = f"{path}:{number}"
            match json.loads(line) if line.strip() else {"text": ""}:
                case {"prompt": str(prompt), "answer": str(answer)}:
                    documents.append(Document(answer, prompt))
                case {"text": str(text)}:
                    documents.append(Document(text))
                case _:
                    raise ValueError('needs "text", or "prompt" and "answer", each a string')
        documents = [document for document in documents if document.text.strip()]
        if not documents:
            raise ValueError("holds no text")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"train.documents: {where}: cannot be read: {error}") from error
    return documents


def tokenised(model: Model, documents: Sequence[Document], options: DataOptions) -> list[Text]:
    """Texts to train on, of the lengths that written ones have.

    Running text is cut into parts of `options.answer` tokens, all of which count as an answer. A question goes into
    the model's template as a written text's prompt does, and is left out with its answer if it has more tokens than
    `options.prompt_tokens`; the answer is cut to `options.answer`. Parts of under 8 tokens are left out.
    """
    tokenizer, length, texts = model.tokenizer, options.answer, []
    for document in documents:
        ids = np.asarray(tokenizer.encode(document.text), np.int32)
        if document.prompt is None:
            before = np.array([tokenizer.bos_id] if tokenizer.add_bos else [], np.int32)
            parts = [ids[start : start + length] for start in range(0, len(ids), length)]
        else:
            before, parts = encode(model, document.prompt, chat=options.chat), [ids[:length]]
            if len(before) > options.prompt_tokens:
                continue
        # without BOS the first token begins the text
        texts += [Text(np.concatenate([before, p]), max(len(before), 1)) for p in parts if len(p) >= _SHORTEST]
    return texts


class Features:
    """Reads texts with a target, anew each time: kept, its rows would be a thousand times larger than the texts.

    Args:
        model: the target.
        layers: ids of layers; the rows are those of the residual stream that enter them, not normalised. The number of
            layers stands for the rows before the output norm.
    """

    def __init__(self, model: Model, layers: Sequence[int]):
        self.model, self.layers = model, tuple(layers)
        want = Want(logits="none", hidden=self.layers)

        def rows(params, tokens_Bn, count_B, cache: KVCache):
            return model.forward(params, tokens_Bn, cache, n_valid_B=count_B, want=want)[0].hidden

        self._rows = model.devices.jit(rows)

    def of(self, texts: Sequence[Text]) -> list[Text]:
        """The texts with float32[n, len(layers) D], the rows of one layer after those of another."""
        out: list[Text] = list(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        for start in range(0, len(order), _BATCH):
            group = order[start : start + _BATCH]
            length = -(-len(texts[group[-1]].tokens) // _STEP) * _STEP
            tokens, count = np.zeros((_BATCH, length), np.int32), np.zeros(_BATCH, np.int32)
            for b, i in enumerate(group):
                count[b] = len(texts[i].tokens)
                tokens[b, : count[b]] = texts[i].tokens
            capacity = self.model.capacity_for(length)
            cache = self.model.new_cache(_BATCH, capacity)
            args = self.model.everywhere((tokens, count, cache))
            found = np.asarray(jax.block_until_ready(self._rows(self.model.params_for(capacity), *args)))
            for b, i in enumerate(group):
                out[i] = replace(texts[i], hidden=found[b, : count[b]])
        return out


class Window(NamedTuple):
    """Texts side by side in n rows, of which m are drafted from. Row i stands for h_i and the token after it.

    Attributes:
        hidden: [n, W], what the target has at the token before each row: D numbers for each of `Form.layers`.
        after: [m, D], h_{i+1} of the drafting rows: what they should find.
        tokens: int32[n], the token after each row.
        position: int32[n], of h_i in its text.
        text: int32[n], which text a row belongs to; -1 for none.
        rows: int32[m], the drafting rows, ascending, those of a text one after the other.
        depth: int32[m], drafting rows of the same text before this one; -1 if there is no row.
    """

    hidden: jax.Array
    after: jax.Array
    tokens: jax.Array
    position: jax.Array
    text: jax.Array
    rows: jax.Array
    depth: jax.Array

    def same_text(self) -> jax.Array:
        """bool[m, n]: whether a row is of the drafting row's text; False for padding."""
        mine = jnp.where(self.depth >= 0, self.text[self.rows], -2)
        return self.text[None] == mine[:, None]


def spans(text: Text) -> tuple[int, int]:
    """(rows, drafting rows) of a text: a row for each token with a row after it, drafting from the answer's on."""
    rows = len(text.tokens) - 1
    return rows, rows - max(text.prompt - 2, 0)


@dataclass
class _Open:
    """A window with room left: its rows, its drafting rows, and which texts it holds."""

    rows: int = 0
    drafting: int = 0
    texts: list[int] = field(default_factory=list)


def pack(texts: Sequence[Text], order: Iterable[int], *, rows: int, drafting: int) -> list[list[int]]:
    """Which texts go together into windows of `rows` rows and `drafting` drafting rows, taken in that order.

    A text goes into the fullest of the open windows that has room; one without an answer is left out.
    """
    waiting: list[_Open] = []
    full: list[list[int]] = []
    for index in order:
        n, m = spans(cut(texts[index], rows=rows, drafting=drafting))
        if m < 1 or n < 1:
            continue
        fits = [w for w in waiting if w.rows + n <= rows and w.drafting + m <= drafting]
        if fits:
            chosen = max(fits, key=lambda w: w.rows)
        else:
            chosen = _Open()
            waiting.append(chosen)
        chosen.rows, chosen.drafting = chosen.rows + n, chosen.drafting + m
        chosen.texts.append(int(index))
        if len(waiting) > _OPEN:
            waiting.sort(key=lambda w: w.rows)
            full.append(waiting.pop().texts)
    return full + [w.texts for w in waiting]


def fill_up(texts: Sequence[Text], order: Iterable[int], *, rows: int, least: int = 32) -> Iterator[list[int]]:
    """Which texts go together into full windows of `rows` rows, in that order: the last text of one loses its end.

    A text of whose answer less than `least` tokens would be left begins the next window instead; one without an answer
    is left out.
    """
    group: list[int] = []
    used = 0
    for index in order:
        if len(texts[index].tokens) <= texts[index].prompt:
            continue
        if group and used + texts[index].prompt + least > rows:
            yield group
            group, used = [], 0
        group.append(int(index))
        used += len(texts[index].tokens)
    if group:
        yield group


def cut(text: Text, *, rows: int, drafting: int) -> Text:
    """The text's end in at most that many rows, and drafting rows."""
    n, m = spans(text)
    over = max(m - drafting, 0)
    end, drop = len(text.tokens) - over, max(n - over - rows, 0)
    hidden = None if text.hidden is None else text.hidden[drop:end]
    return Text(text.tokens[drop:end], text.prompt - drop, hidden)


def fill(texts: Sequence[Text], *, rows: int, drafting: int, width: int) -> Window:
    """The window of texts that `pack` put together, as numpy arrays; they have their rows, the last D = `width` numbers
    of which are those before the target's output norm."""
    texts = [cut(text, rows=rows, drafting=drafting) for text in texts]
    n, m = rows, drafting
    out: dict[str, Any] = dict(
        hidden=np.zeros((n, texts[0].read.shape[1]), np.float32),
        after=np.zeros((m, width), np.float32),
        tokens=np.zeros(n, np.int32),
        position=np.zeros(n, np.int32),
        text=np.full(n, -1, np.int32),
        rows=np.zeros(m, np.int32),
        depth=np.full(m, -1, np.int32),
    )
    row = at = 0
    for index, text in enumerate(texts):
        count, drafting = spans(text)
        here = slice(row, row + count)
        out["hidden"][here], out["tokens"][here] = text.read[:-1], text.tokens[1:]
        out["position"][here], out["text"][here] = np.arange(count), index
        those = slice(at, at + drafting)
        out["rows"][those] = row + count - drafting + np.arange(drafting)
        out["after"][those] = text.read[count - drafting + 1 :, -width:]
        out["depth"][those] = np.arange(drafting)
        row, at = row + count, at + drafting
    return Window(**out)
