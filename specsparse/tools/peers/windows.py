"""Windows of a real text: what an audit's prompts are, and the text behind each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsparse.data import prompts
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError


@dataclass(frozen=True)
class AuditWindow:
    """A prompt, and the tokens that follow it in the text; `name` says where it stands."""

    name: str
    prompt: tuple[int, ...]
    following: tuple[int, ...]


def token_ids(tokenizer: Tokenizer, file: Path | None) -> list[int]:
    """The tokens of a file, or of the built-in prompts one after the other.

    Raises:
        UserError: the file cannot be read.
    """
    if file is None:
        return tokenizer.encode("\n\n".join(prompt.text for prompt in prompts.load()))
    try:
        return tokenizer.encode(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"--text {file}: cannot be read: {reason}") from None


def cut(ids: Sequence[int], count: int, *, prompt: int, following: int, bos: int | None) -> list[AuditWindow]:
    """Windows evenly spread over a text, which do not overlap.

    Args:
        ids: the text.
        count: windows.
        prompt, following: tokens of each part.
        bos: what a prompt begins with, in place of its first token; None for nothing.

    Raises:
        UserError: the text is too short.
    """
    size = prompt + following
    if len(ids) < count * size:
        raise UserError(
            f"the text has {len(ids)} tokens and {count} windows of {size} take {count * size}: give a longer --text, "
            "or fewer --windows, --prompt-tokens or --tokens"
        )
    stride, out = len(ids) // count, []
    for start in range(0, count * stride, stride):
        first = [bos] if bos is not None else [ids[start]]
        head = (*first, *ids[start + 1 : start + prompt])
        out.append(AuditWindow(f"token {start}", head, tuple(ids[start + prompt : start + size])))
    return out
