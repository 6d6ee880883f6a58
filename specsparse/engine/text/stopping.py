"""Stop strings: the place where a text ends, and how much of it may be shown before that is known."""

from collections import deque
from collections.abc import Iterable

from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.tokenizer import Tokenizer


class TokenText:
    """The text of tokens that come one after the other, up to the earliest stop string that ends it.

    A stop string that one of the first `min_tokens` tokens completes does not end it (vLLM's rule).

    Attributes:
        texts: the text that each token taken adds, as far as it may be shown, that of the last token included.
        found: the stop string that was found, or None; tokens after it are not taken.
        ended: whether nothing more comes.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._decoder = tokenizer.stream(skip_special=params.skip_special_tokens)
        self._stops = tuple(params.stop or ())
        self._include = params.include_stop_str_in_output
        self._least = params.min_tokens
        self._held = ""  # could be the start of a stop string
        self._waiting: deque[tuple[int, str]] = deque()
        self.texts: list[str] = []
        self.found: str | None = None
        self.ended = False

    def push(self, tokens: Iterable[int], *, last: bool) -> list[tuple[int, str]]:
        """Takes the next tokens, after which nothing comes if `last`.

        Returns:
            The text that may be shown now, in parts, each with the index of its token.
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

    def _show(self, new: str, *, last: bool = False) -> list[tuple[int, str]]:
        """Takes the text that the last token adds; the parts of tokens that may be shown now."""
        self._waiting.append((self.count - 1, new))
        text = self._held + new
        # Only a stop string that a character of `new` completes counts: the others came too early.
        ends = [(text.find(s, max(0, len(self._held) + 1 - len(s))), -len(s), s) for s in self._stops]
        at, _, self.found = min((end for end in ends if end[0] >= 0), default=(-1, 0, None))
        if self.count <= self._least:
            self.found = None
        if self.found:
            left, self._held = at + (len(self.found) if self._include else 0), ""
        else:
            may_be_stop = (n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n]))
            left = len(text) - (0 if last else max(may_be_stop, default=0))
            self._held = text[left:]
        parts = []
        while left:
            index, text = self._waiting.popleft()
            if len(text) > left:
                self._waiting.appendleft((index, text[left:]))
            if text := text[:left]:
                parts.append((index, text))
                self.texts[index] += text
            left -= len(text)
        return parts

    @property
    def count(self) -> int:
        """Tokens taken, the one that completed the stop string included."""
        return len(self.texts)

    @property
    def text(self) -> str:
        return "".join(self.texts)
