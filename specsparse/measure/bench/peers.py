"""Other engines on the same file as a benchmark's sides."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specsparse.engine.config import ModelConfig
from specsparse.measure.bench.sides import token_ids
from specsparse.measure.peers.process import PeerProcess

EXPECTED_TG = {"Q4_1": 149.0, "Q4_0": 201.0, "Q8_0": 165.0}
"""llama.cpp's tokens per second on SmolLM2-135M: native build, two threads, a machine with AVX-512 VNNI and 34 GB/s."""
_EXPECTED_SHAPE = (30, 576, 49152)


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
    """A peer's process as a `sides.Side`, once it is open.

    Attributes:
        load_s: seconds that it took to load the model.
    """

    load_s = 0.0

    def open(self, model: Path, config: ModelConfig, *, threads: int, room: int, depth: int) -> None:
        """Loads `model` for tests of up to `room` tokens after `depth`."""
        tokens = token_ids(depth + room, config.vocab_size).tolist()
        request = {"model": str(model.resolve()), "threads": threads, "room": room, "depth": depth, "tokens": tokens}
        self.load_s = self.timed(do="open", **request, **self.kind.options)["seconds"]

    def prompt(self, n: int) -> float:
        """See `Side`."""
        return self.timed(do="prompt", n=n)["seconds"]

    def decode(self, n: int) -> float:
        """See `Side`."""
        return self.timed(do="decode", n=n)["seconds"]

    def verify(self, n: int) -> float:
        """See `Side`."""
        return self.timed(do="verify", n=n)["seconds"]

    def speculate(self, ids: list[int], n: int, *, drafted: int, draft: Path | None = None) -> WrittenText:
        """n greedy tokens after a prompt and a first token, with drafts of a second model, else by prompt lookup.

        `drafted` 0 is plain decoding. llama.cpp only.
        """
        path = None if draft is None else str(draft.resolve())
        return WrittenText(**self.timed(do="speculate", ids=ids, n=n, drafted=drafted, draft=path))


def below_expectation(config: ModelConfig, kind: str, rate: float, flags: list[str], threads: int) -> str | None:
    """A line that says so where llama.cpp decodes more than 20 % under its known figure, else None.

    Args:
        config, kind: the model and its main tensor type; the figures are for SmolLM2-135M.
        rate: tokens per second.
        flags: of the processor; the figures need AVX-512.
        threads: the figures are for two.
    """
    expected = EXPECTED_TG.get(kind)
    shape = (config.n_layers, config.d_model, config.vocab_size)
    if expected is None or shape != _EXPECTED_SHAPE or threads < 2 or rate >= 0.8 * expected:
        return None
    line = f"llama.cpp decodes {rate:.0f} tok/s, {1 - rate / expected:.0%} under the {expected:.0f} known for {kind}"
    if "avx512f" not in flags:
        return f"{line} on a machine with AVX-512, which this one lacks"
    return f"{line}: a build without AVX-512, or a busy machine; take the ratio with care"
