"""Texts that others wrote, as what a drafter is trained on.

The loss at a token is the divergence from the target's law there, whoever wrote the token; what comes next in the text
says nothing. So a fixed text serves as well as one of the target's making (EAGLE, arXiv:2401.15077, trains on fixed
dialogues) and costs a forward pass, where an answer costs its decoding.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.training.data import DataOptions, Text, encode

_SHORTEST = 8
"""Tokens under which a piece says too little to be kept."""


class Document(NamedTuple):
    """A text, or a question and its answer.

    Attributes:
        text: running text, or the answer.
        prompt: the user's turn before an answer; None for running text.
    """

    text: str
    prompt: str | None = None


def read_documents(path: Path) -> list[Document]:
    """What a file holds: one text; or, where its name ends in .jsonl, on each line an object with "text", or with
    "prompt" and "answer".

    Raises:
        UserError: no such file, no UTF-8, a malformed line, or nothing to read.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"train.documents: {path}: cannot be read ({error})") from error
    if path.suffix == ".jsonl":
        found = [_of_line(line, f"{path}:{n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        found = [Document(text)]
    found = [document for document in found if document.text.strip()]
    if not found:
        raise UserError(f"train.documents: {path}: holds no text")
    return found


def _of_line(line: str, where: str) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"train.documents: {where}: is no JSON ({error})") from error
    if isinstance(row, dict):
        match row:
            case {"prompt": str(prompt), "answer": str(answer)}:
                return Document(answer, prompt)
            case {"text": str(text)}:
                return Document(text)
    raise UserError(f'train.documents: {where}: needs "text", or "prompt" and "answer", each a string')


def tokenised(model: Model, documents: Sequence[Document], options: DataOptions) -> list[Text]:
    """Texts to train on, of the lengths that written ones have.

    Running text is cut into pieces of `options.answer` tokens, all of which count as an answer. A question goes into
    the model's template as a written text's prompt does, and is left out with its answer where it has more tokens than
    `options.prompt_tokens`; the answer is cut to `options.answer`. Pieces of under 8 tokens are left out.
    """
    return [text for document in documents for text in _texts(model, document, options)]


def _texts(model: Model, document: Document, options: DataOptions) -> Iterator[Text]:
    tokenizer, length = model.tokenizer, options.answer
    ids = np.asarray(tokenizer.encode(document.text), np.int32)
    if document.prompt is None:
        before = np.array([tokenizer.bos_id] if tokenizer.add_bos else [], np.int32)
        pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
    else:
        before, pieces = encode(model, document.prompt, chat=options.chat), [ids[:length]]
        if len(before) > options.prompt_tokens:
            return
    for piece in pieces:
        if len(piece) >= _SHORTEST:
            yield Text(np.concatenate([before, piece]), max(len(before), 1))  # without BOS the first token begins it
