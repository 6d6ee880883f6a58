"""Stop strings: where a text ends, and what of it may be shown before that is known."""

from collections import deque
from collections.abc import Iterable

from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.tokenizer import Tokenizer


class TextStop:
    """Looks for the earliest stop string in a text that comes in pieces.

    Attributes:
        found: the one that was found, or None; nothing is returned after it.
    """

    def __init__(self, params: SamplingParams):
        self._stops = tuple(params.stop or ())
        self._include = params.include_stop_str_in_output
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """The text that may be shown now; what could be the start of a stop string is held back.

        Only a stop string that a character of this piece completes is looked for, and none where not `may_end`.
        """
        if self.found:
            return ""
        text, before = self._held + piece, len(self._held)
        hits = [
            (at, -len(s), s) for s in self._stops if may_end and (at := text.find(s, max(0, before + 1 - len(s)))) >= 0
        ]
        if hits:
            at, _, s = min(hits)
            self.found, self._held = s, ""
            return text[: at + len(s)] if self._include else text[:at]
        keep = max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        shown = text[: len(text) - keep]
        self._held = text[len(shown) :]
        return shown

    def flush(self) -> str:
        """What is still held back when the text has ended."""
        held, self._held = self._held, ""
        return held


class TokenText:
    """The text of tokens that come one after the other, up to the first stop string that ends it.

    A stop string that one of the first `min_tokens` tokens completes does not end it (vLLM's rule).

    Attributes:
        texts: what each token taken adds to what may be shown so far, the one that completed the stop string included.
        ended: whether nothing more comes.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._decoder = tokenizer.stream(skip_special=params.skip_special_tokens)
        self._stop = TextStop(params)
        self._least = params.min_tokens
        self._waiting: deque[tuple[int, str]] = deque()
        self.texts: list[str] = []
        self.ended = False

    def push(self, tokens: Iterable[int], *, last: bool) -> list[tuple[int, str]]:
        """Takes the next tokens, after which nothing comes if `last`.

        Returns:
            The text that may be shown now, in pieces with the index of the token that each is of.
        """
        shown = []
        for token in tokens:
            if self.found:
                break
            self.texts.append("")
            shown += self._show(self._decoder.push(int(token)))
        if last and not self.found:
            shown += self._show(self._decoder.flush(), last=True)
        self.ended = last or self.found is not None
        return shown

    def _show(self, piece: str, *, last: bool = False) -> list[tuple[int, str]]:
        """Takes what the last token adds; the pieces of tokens that may be shown now."""
        self._waiting.append((self.count - 1, piece))
        shown = self._stop.push(piece, may_end=self.count > self._least)
        left, pieces = len(shown + self._stop.flush() if last and not self.found else shown), []
        while left:
            index, text = self._waiting.popleft()
            if len(text) > left:
                self._waiting.appendleft((index, text[left:]))
            if text := text[:left]:
                pieces.append((index, text))
                self.texts[index] += text
            left -= len(text)
        return pieces

    @property
    def count(self) -> int:
        """Tokens taken, the one that completed the stop string included."""
        return len(self.texts)

    @property
    def text(self) -> str:
        """What may be shown of it so far."""
        return "".join(self.texts)

    @property
    def found(self) -> str | None:
        """The stop string that was found, or None; tokens after it are not taken."""
        return self._stop.found
