"""Stop strings: where a text ends, and what of it may be shown before that is known."""

from specsparse.engine.params import SamplingParams


class TextStop:
    """Looks for the earliest stop string in a text that comes in pieces.

    Attributes:
        found: whether one was found; nothing is returned after it.
        end: characters of the whole text up to and including the stop string.
    """

    def __init__(self, params: SamplingParams):
        self._stops = tuple(params.stop or ())
        self._include = params.include_stop_str_in_output
        self._held = ""
        self._passed = 0
        self.found = False
        self.end = 0

    def push(self, piece: str) -> str:
        """The text that may be shown now; what could be the start of a stop string is held back."""
        if self.found:
            return ""
        text = self._held + piece
        hits = [(at, -len(s), s) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:
            at, _, s = min(hits)
            self.found, self._held, self.end = True, "", self._passed + at + len(s)
            return text[: at + len(s)] if self._include else text[:at]
        keep = max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        shown = text[: len(text) - keep]
        self._held, self._passed = text[len(shown) :], self._passed + len(shown)
        return shown

    def flush(self) -> str:
        """What is still held back when the text has ended."""
        held, self._held = self._held, ""
        return held
