"""Another engine as a benchmark's side: timed with the faster of its kinds of attention, its logits checked before."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from specsparse.engine.config import ModelConfig
from specsparse.engine.model import Model
from specsparse.measure.trials import TrialPlan, token_ids
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved
from specsparse.tools.peers.logits import CHECKED, Check, OurRows, PeerRows, real_text, text_ids
from specsparse.tools.peers.process import PeerError, PeerProcess

EXPECTED_TG = {"Q4_1": 149.0, "Q4_0": 201.0, "Q8_0": 165.0}
"""llama.cpp's tokens per second on SmolLM2-135M: native build, two threads, a machine with AVX-512 VNNI and 34 GB/s."""
_EXPECTED_SHAPE = (30, 576, 49152)
_CHOOSING = 3
"""Timings of a test with flash attention and without, by which the one that is timed is chosen."""
_STEPS = 8
"""Tokens of each sequence in those of a batch."""


@dataclass(frozen=True)
class WrittenText:
    """A text after its first token.

    Attributes:
        seconds: of all tokens but the first.
        tokens: ids, the first one too.
        passes: of the target, for all tokens but the first.
    """

    seconds: float
    tokens: Sequence[int]
    passes: float


class Peer(PeerProcess):
    """A peer's process as a `trials.Side`, once it is open.

    Attributes:
        load_s: seconds that it took to load the model.
        flash: by method of `Side`, whether flash attention is on; a method that is not there runs as the library
            chooses by itself.
        checked: its logits beside ours one row at a time and in wide batches, with the attention that is timed for as
            many rows; or None.
        unchecked: why those could not be compared, or None.
    """

    load_s = 0.0
    checked: tuple[Check, Check] | None = None
    unchecked: str | None = None

    def __init__(self, name: str):
        """Starts the process; errors as `PeerProcess`."""
        self.flash: dict[str, bool] = {}
        self._on: bool | None = None
        super().__init__(name)

    def open(self, model: Path, config: ModelConfig, *, threads: int, room: int, depth: int) -> None:
        """Loads `model` for tests of up to `room` tokens after `depth`."""
        tokens = token_ids(depth + room, config.vocab_size).tolist()
        request = {"model": str(model.resolve()), "threads": threads, "room": room, "depth": depth, "tokens": tokens}
        self._on = self.kind.flash or None
        flash = {"flash": True} if self.kind.flash else {}
        self.load_s = self.timed(do="open", **request, **flash, **self.kind.options)["seconds"]

    def check(self, model: Model, *, widest: int, one: str = "decode", wide: str = "verify") -> None:
        """Compares its logits of real text with those of `model`, from the same file, before anything is timed.

        Args:
            model: ours.
            widest: rows of the wide batches.
            one, wide: methods of `Side` whose attention, if it is chosen, takes one row and the wide batches.
        """
        real = text_ids(model.tokenizer, None)[: min(CHECKED, model.config.context_length - widest)]
        rows = _RowsAsTimed(self, {1: one, widest: wide})
        try:
            self.checked = real_text(rows, OurRows(model, len(real) + widest), real, widest)
        except PeerError as error:
            self.unchecked = str(error)

    def choose(self, plan: TrialPlan) -> None:
        """Takes the faster of flash attention on and off for each kind of test, by its longest."""
        longest = {test.method: test for test in plan.tests()}
        for method, test in longest.items() if self.kind.flash else ():
            self.flash[method] = _faster(partial(self._timed, method, test.n))

    def choose_for_batches(self, sizes: Mapping[int, Sequence[Sequence[int]]], n: int) -> dict[int, bool]:
        """The same for batches of up to n tokens of each sequence, by their number; `sizes` are their prompts.

        The smallest batch stands for `decode` and the largest for `verify` in `check` and in `facts`.
        """
        found = {size: _faster(partial(self.batch, prompts, min(n, _STEPS))) for size, prompts in sizes.items()}
        self.flash = {"decode": found[min(sizes)], "verify": found[max(sizes)]}
        return found

    def choose_for_writing(self, ids: list[int], n: int) -> None:
        """The same for `speculate`, by a plain text of n tokens."""
        self.flash["speculate"] = _faster(lambda on: self._write(ids, n, flash=on).seconds)

    def facts(self) -> Json:
        """For a report: "check" has the two of `checked` under "one_row" and "widest"."""
        checked = self.checked and dict(zip(("one_row", "widest"), (part.to_dict() for part in self.checked)))
        return {
            "name": self.name, "version": self.version, "system_info": self.system_info, "load_s": self.load_s,
            "flash": dict(self.flash), "check": checked, "unchecked": self.unchecked,
        }  # fmt: skip

    def attend(self, flash: bool | None) -> None:
        """Goes on with flash attention or without; None as it is."""
        if flash is not None and flash != self._on:
            self.timed(do="attend", flash=flash)
            self._on = flash

    def _timed(self, method: str, n: int, flash: bool | None) -> float:
        self.attend(flash)
        return self.timed(do=method, n=n)["seconds"]

    def prompt(self, n: int) -> float:
        return self._timed("prompt", n, self.flash.get("prompt"))

    def decode(self, n: int) -> float:
        return self._timed("decode", n, self.flash.get("decode"))

    def verify(self, n: int) -> float:
        return self._timed("verify", n, self.flash.get("verify"))

    def batch(self, prompts: Sequence[Sequence[int]], n: int, flash: bool) -> float:
        """Seconds of n tokens of each sequence behind its prompt, one of each a pass; peers with an "attend" only."""
        return self.timed(do="batch", prompts=[list(map(int, p)) for p in prompts], n=n, flash=flash)["seconds"]

    def speculate(self, ids: list[int], n: int, *, drafted: int, draft: Path | None = None) -> WrittenText:
        """n greedy tokens after a prompt and a first token, with drafts of a second model, else by prompt lookup.

        `drafted` 0 is plain decoding. llama.cpp only.
        """
        path = None if draft is None else str(draft.resolve())
        return self._write(ids, n, drafted=drafted, draft=path, flash=self.flash.get("speculate", False))

    def _write(self, ids: list[int], n: int, *, flash: bool, drafted: int = 0, draft: str | None = None) -> WrittenText:
        return WrittenText(**self.timed(do="speculate", ids=ids, n=n, drafted=drafted, draft=draft, flash=flash))


class _RowsAsTimed(PeerRows):
    """Its logits by widths, each with the attention that a method of `Side` is timed with."""

    def __init__(self, peer: Peer, methods: Mapping[int, str]):
        super().__init__(peer)
        self._peer, self._methods = peer, methods

    def rows(self, prompt: Sequence[int], text: Sequence[int], width: int) -> np.ndarray:
        self._peer.attend(self._peer.flash.get(self._methods[width]))
        return super().rows(prompt, text, width)


def _faster(seconds: Callable[[bool], float]) -> bool:
    """Whether flash attention is: `seconds(on)` interleaved, by the medians."""
    ways = (True, False)
    found = interleaved({on: partial(seconds, on) for on in ways}, repeats=_CHOOSING)
    return min(ways, key=lambda on: statistics.median(found[on]))


def perplexities(check: Json) -> str:
    """ "check" of `Peer.facts` as a line."""
    one, wide = (check[how] for how in ("one_row", "widest"))
    theirs = f"{one['perplexity']:.2f} one row at a time, {wide['perplexity']:.2f} in batches"
    return f"perplexity {theirs}; ours {one['ours']:.2f}"


def wrong_logits(peer: Json) -> Iterator[str]:
    """Lines on a peer (see `Peer.facts`) whose figures are not those of this model."""
    if peer["unchecked"]:
        yield f"{peer['name']}: its perplexity was not compared with ours, so take care: {peer['unchecked']}"
    for how, found in (peer["check"] or {}).items():
        if found["wrong"]:
            rows = "one row at a time" if how == "one_row" else "in wide batches"
            yield (
                f"{peer['name']} computes other logits than this model's {rows}: perplexity {found['perplexity']:.4g}, "
                f"ours {found['ours']:.4g}, KL {found['kl']:.2g} nats; its times there are of something else"
            )


def below_expectation(
    config: ModelConfig, kind: str, rate: float, flags: list[str], threads: int, *, depth: int = 0
) -> str | None:
    """A line if llama.cpp decodes more than 20 % under its known figure, else None.

    Args:
        config, kind: the model and its main tensor type; the figures are for SmolLM2-135M.
        rate: tokens per second.
        flags: of the processor; the figures need AVX-512.
        threads: the figures are for two.
        depth: tokens in the cache before; the figures are for none.
    """
    expected = EXPECTED_TG.get(kind)
    shape = (config.n_layers, config.d_model, config.vocab_size)
    if expected is None or shape != _EXPECTED_SHAPE or threads < 2 or depth or rate >= 0.8 * expected:
        return None
    line = f"llama.cpp decodes {rate:.0f} tok/s, {1 - rate / expected:.0%} under the {expected:.0f} known for {kind}"
    if "avx512f" not in flags:
        return f"{line} on a machine with AVX-512, which this one lacks"
    return f"{line}: a build without AVX-512, or a busy machine; take the ratio with care"
