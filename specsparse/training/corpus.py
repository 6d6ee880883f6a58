"""The text that drafters are trained on, as token ids: the target's answers to generated prompts, and documents.

Prompts are a small grammar expanded at random, over the tasks of the built-in prompts, or the target's own
(`make_shard`). Answers stand in files that a restart finds again. Texts get the target's rows (`Features`), and are
packed side by side into windows of one shape, so that one program serves them all.

The loss at a token compares with the target's distribution there, whoever wrote the token. So a document
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
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.engine.generate import Finish
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError, refuse
from specsparse.runtime.method import Method
from specsparse.runtime.session import Request, Session
from specsparse.support.files import read_tensors, write_tensors
from specsparse.support.options import Count, Internal, Positive, Range

_GRAMMAR_FILE = Path(__file__).parents[1] / "data" / "training_prompts.json"
_SLOT = re.compile(r"\{([a-z_-]+|\d+\.\.\d+)\}")
_DEEPEST = 12
_TRIED = 1000  # generated prompts of which one must be short enough
_ROUNDS = 12  # tokens between two looks at which texts have ended
_SHORTEST = 8  # tokens under which a part of a document, or a text of the target's own, says too little to be kept
_GRAM = 4  # tokens of the n-grams by which a text is found to repeat itself
_TURN = "<the user's turn>"
_FORMAT = "specsparse.training.texts"
_BATCH, _STEP = 8, 128
"""Texts of a forward pass, and what its length is a multiple of: few shapes, so that few programs are compiled."""
_OPEN = 8  # windows that wait for a text that still fits


@dataclass(frozen=True)
class DataOptions:
    """The text to make."""

    # prompts of the `grammar`, or those that the model writes itself, see `make_shard`
    text: Literal["grammar", "self"] = "grammar"
    turn_temperature: Positive = 1.0  # of its own prompts
    # the largest share of a text's 4-grams that stood in it before: a prompt of its own with more is left out, the
    # answer to one is cut where it begins to repeat itself
    repeated: Annotated[float, Range(0, 1)] = 0.3
    batch: Count = 16  # texts written together; where one ends, the next one begins
    batches: Count = 8  # of a file
    answer: Count = 240  # tokens of an answer, at most
    prompt_tokens: Count = 256  # longer prompts are left out
    temperatures: tuple[Annotated[float, Range(0)], ...] = (0.0, 0.7, 0.0, 1.0)  # of the answers, in turn; 0 is greedy
    chat: Annotated[bool, Internal()] = True  # each prompt is a user's turn in the model's template
    seed: Annotated[int, Internal()] = 0  # of prompts and answers

    def __post_init__(self):
        templated = "train.text=self: the model writes a user's turn in its chat template, give data.chat=true"
        refuse({
            "train.temperatures=[]: at least one is needed": not self.temperatures,
            templated: self.text == "self" and not self.chat,
        })  # fmt: skip


@dataclass(frozen=True)
class Text:
    tokens: np.ndarray  # int32[n], prompt and answer
    prompt: int  # tokens of the prompt
    hidden: np.ndarray | None = None  # float32[n, W], the target's rows at these tokens, if `Features` made them

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


def answer(model: Model, requests: list[Request]) -> list[Text]:
    """The model's answers to prompts, decoded together; plain decoding's tokens."""
    session = Session(model, requests, Method())
    session.advance()
    answered = zip(requests, session.tokens(), strict=True)
    return [Text(np.concatenate([r.prompt, out]).astype(np.int32), len(r.prompt)) for r, out in answered]


def encode(model: Model, text: str, *, chat: bool) -> np.ndarray:
    """int32[n]: a prompt's text, as a user's turn in the model's template if `chat`."""
    tokenizer = model.tokenizer
    if chat:
        turn = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return np.asarray(tokenizer.encode(turn, parse_special=True), np.int32)
    return np.asarray(tokenizer.encode(text, add_special=True), np.int32)


def unrepeated(ids: np.ndarray, *, share: float) -> int:
    """Tokens before a text, int[n], repeats itself: before a larger share of its 4-grams so far stood in it before.

    A text of under 8 tokens does not.
    """
    if len(ids) < _SHORTEST:
        return len(ids)
    grams = np.lib.stride_tricks.sliding_window_view(ids, _GRAM)
    new = np.zeros(len(grams), int)
    new[np.unique(grams, axis=0, return_index=True)[1]] = 1
    count = np.arange(1, len(grams) + 1)
    repeats = (np.cumsum(new) < (1 - share) * count) & (count + _GRAM > _SHORTEST)
    return int(np.append(repeats, True).argmax()) + _GRAM - 1


def make_shard(model: Model, options: DataOptions, index: int) -> list[Text]:
    """The answers of file `index`: the same whenever and in whatever order files are made. A UserError if hardly a
    prompt is short enough, or none of the model's own passes.

    File i holds what passes of the numbers from i * batch * batches on: the files of any batch hold the same texts in
    the same order. Number n has noise of its own, so its text is the same in every batch (contract C1).

    With text=self the model is given its chat template up to the user's turn, and writes the turn as it writes any text
    (Magpie, arXiv:2406.08464). A turn is left out if it does not end, holds another special token, is shorter than 8
    tokens or repeats itself.
    """
    count, own, tokenizer = options.batch * options.batches, options.text == "self", model.tokenizer
    limit = min(options.prompt_tokens, model.config.context_length - 2)
    params = [SamplingParams(temperature=t, max_tokens=options.answer) for t in options.temperatures]

    def asked(number: int, prompt_ids: np.ndarray) -> Request:
        return Request(prompt_ids, params[number % len(params)], options.seed, 2 * number + 1)

    def generated(number: int) -> np.ndarray:
        tried = range(_TRIED * number, _TRIED * (number + 1))
        each = (encode(model, prompt(i, seed=options.seed)[1], chat=options.chat) for i in tried)
        if (found := next((ids for ids in each if 0 < len(ids) <= limit), None)) is None:
            raise UserError(f"no generated prompt has at most {limit} tokens: raise train.prompt_tokens")
        return found

    numbers = range(index * count, (index + 1) * count)
    if own:
        before, mark, _ = tokenizer.apply_chat_template([{"role": "user", "content": _TURN}]).partition(_TURN)
        if not mark:
            raise UserError(f"{model.path}: train.text=self needs a chat template that holds the user's turn as it is")
        begin = np.asarray(tokenizer.encode(before, parse_special=True), np.int32)
        turn = SamplingParams(temperature=options.turn_temperature, max_tokens=max(limit - len(begin), 1))
        waiting = (Request(begin, turn, options.seed, 2 * number) for number in numbers)
    else:
        waiting = (asked(number, generated(number)) for number in numbers)
    roomy = model.with_own_programs(least_slots=limit + options.answer + model.width)
    session = Session(roomy, list(itertools.islice(waiting, options.batch)), Method())
    texts, live = {}, set(range(options.batch))
    while live:
        session.advance(_ROUNDS)
        written, finish, following = session.tokens(), session.finish, {}
        for b in sorted(live):
            request, ids = session.sequences[b], written[b]
            number, answers = divmod(request.sample, 2)
            good = unrepeated(ids, share=options.repeated) if own else len(ids)
            if finish[b] is Finish.RUNNING and good == len(ids):
                continue
            prompt_ids = None
            if answers:
                texts[number] = Text(np.concatenate([request.prompt, ids[:good]]).astype(np.int32), len(request.prompt))
            elif finish[b] is Finish.STOP and _SHORTEST < good == len(ids):
                turn_ids = ids[:-1].tolist()  # without the token that ended it
                if tokenizer.special_ids.isdisjoint(turn_ids):
                    prompt_ids = encode(model, tokenizer.decode(turn_ids).strip(), chat=True)
            if prompt_ids is not None and len(prompt_ids) <= limit:
                following[b] = asked(number, prompt_ids)
            elif (other := next(waiting, None)) is not None:
                following[b] = other
            else:
                live.remove(b)
                session.drop([b])
        session.admit(following)
    least = _SHORTEST if own else 0
    kept = [text for _, text in sorted(texts.items()) if len(text.tokens) - text.prompt >= least]
    if not kept:
        raise UserError(
            f"train.text=self: none of {count} texts that {model.path} wrote is fit to train on; is it an instruct "
            "model? train.prompt_tokens, train.repeated and train.turn_temperature say what is"
        )
    return kept


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
    model: Model, options: DataOptions, folder: Path, *, tokens: int,
    progress: Callable[[TextWritten], None] | None = None,
) -> list[Path]:  # fmt: skip
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
    """Reads texts with a target. Its rows are in no file: they would be a thousand times larger than the texts.

    Args:
        model: the target.
        layers: ids of layers; the rows are those of the residual stream that enter them, not normalised. The number of
            layers stands for the rows before the output norm.
        room: bytes of rows that are kept for the next time the texts come: reading is half of a training's time.
    """

    def __init__(self, model: Model, layers: Sequence[int], *, room: int = 0):
        self.model, self.layers, self.room = model, tuple(layers), room
        self._kept: dict[bytes, np.ndarray] = {}
        want = Want(logits="none", hidden=self.layers)

        def rows(params, tokens_Bn, count_B, cache: KVCache):
            return model.forward(params, tokens_Bn, cache, n_valid_B=count_B, want=want)[0].hidden

        self._rows = model.devices.jit(rows)

    def of(self, texts: Sequence[Text]) -> list[Text]:
        """The texts with float32[n, len(layers) D], the rows of one layer after those of another."""
        keys = [text.tokens.tobytes() for text in texts]
        new = {key: text.tokens for key, text in zip(keys, texts, strict=True) if key not in self._kept}
        order, read = sorted(new, key=len), dict[bytes, np.ndarray]()
        for start in range(0, len(order), _BATCH):
            group = order[start : start + _BATCH]
            length = -(-len(new[group[-1]]) // _STEP) * _STEP
            tokens, count = np.zeros((_BATCH, length), np.int32), np.zeros(_BATCH, np.int32)
            for b, key in enumerate(group):
                count[b] = len(new[key])
                tokens[b, : count[b]] = new[key]
            capacity = self.model.capacity_for(length)
            cache = self.model.new_cache(_BATCH, capacity)
            args = self.model.everywhere((tokens, count, cache))
            found = np.asarray(jax.block_until_ready(self._rows(self.model.params_for(capacity), *args)))
            for b, key in enumerate(group):
                read[key] = rows = found[b, : count[b]].copy()  # a view would hold the whole batch
                if rows.nbytes <= self.room:
                    self._kept[key], self.room = rows, self.room - rows.nbytes
        read |= self._kept
        return [replace(text, hidden=read[key]) for key, text in zip(keys, texts, strict=True)]


class Window(NamedTuple):
    """Texts side by side in n rows, of which m are drafted from. Row i stands for h_i and the token after it."""

    hidden: jax.Array  # [n, W], what the target has at the token before each row: D numbers for each of `Form.layers`
    after: jax.Array  # [m, D], h_{i+1} of the drafting rows: what they should find
    tokens: jax.Array  # int32[n], the token after each row
    position: jax.Array  # int32[n], of h_i in its text
    text: jax.Array  # int32[n], which text a row belongs to; -1 for none
    rows: jax.Array  # int32[m], the drafting rows, ascending, those of a text one after the other
    depth: jax.Array  # int32[m], drafting rows of the same text before this one; -1 if there is no row

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
