"""What was measured on this machine with one file, as data: times of forwards, rounds and drafts."""

import bisect
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from specsparse.engine.windows import WHOLE, LayerWindows
from specsparse.speculative import expected


@dataclass(frozen=True)
class DraftCost:
    """Seconds to draft: `fixed_s` a round with drafting, `token_s` each token drafted besides."""

    token_s: float = 0.0
    fixed_s: float = 0.0


FREE = DraftCost()
"""A draft that costs nothing."""


@dataclass(frozen=True)
class CostTable:
    """Measured times of one model file on one machine. All in seconds.

    Attributes:
        ns: rows of the forwards measured, ascending from 1.
        kv_base: tokens in the cache during them.
        forward_s: seconds of each, the argmax of its rows included.
        kv_s: seconds that a token more in the cache adds to a forward where all layers read it.
        kv_row_s: the same for each row.
        plain_s: a plain decoding step in the loop, at `kv_base`.
        round_s, round_token_s: what a speculative round adds to its forward (verdict, commit, counters), and adds for
            each token that a draft has room for.
        host_s: of one call of the loop, once a generation.
        bandwidth, int8, f32: bytes read and multiply-adds per second at best; int8 may be None.
        drafts: cost of drafters by name; `token_s` is of a level where they draft trees.
        acceptance: measured acceptance by name: of a chain one rate, of siblings one for each rank, of a tree tokens
            emitted and nodes drafted a round.
        windows: of the model's layers: a token that only some of them read adds their share.
        residuals: of the fits, see `measure`.
        identity: the file and the machine, what the table is valid for.
    """

    ns: tuple[int, ...]
    kv_base: int
    forward_s: tuple[float, ...]
    kv_s: float
    kv_row_s: float
    plain_s: float
    round_s: float
    round_token_s: float
    host_s: float
    bandwidth: float
    int8: float | None
    f32: float
    drafts: dict[str, DraftCost] = field(default_factory=dict)
    acceptance: dict[str, tuple[float, ...]] = field(default_factory=dict)
    windows: LayerWindows = WHOLE
    residuals: dict[str, object] = field(default_factory=dict)
    identity: dict[str, object] = field(default_factory=dict)

    def __post_init__(self):
        times = (*self.forward_s, self.plain_s, self.bandwidth, self.f32)
        ascending = list(self.ns) == sorted(set(self.ns)) and self.ns[:1] == (1,)
        if not ascending or len(self.ns) != len(self.forward_s) or any(not t > 0 for t in times):
            raise ValueError("a cost table needs rows ascending from 1 and a time above 0 for each")

    def forward(self, n: float, kv_length: float | None = None) -> float:
        """Seconds of a forward of n rows; between measured n linear, beyond the last by the last slope."""
        kv = self.kv_base if kv_length is None else kv_length
        more = self.windows.read(1, kv) - self.windows.read(1, self.kv_base)
        return self._at_base(n) + more * (self.kv_s + self.kv_row_s * n)

    def _at_base(self, n: float) -> float:
        if len(self.ns) == 1:
            return self.forward_s[0] * n
        right = min(max(bisect.bisect_left(self.ns, n), 1), len(self.ns) - 1)
        (n0, n1), (t0, t1) = self.ns[right - 1 : right + 1], self.forward_s[right - 1 : right + 1]
        return t0 + (n - n0) * (t1 - t0) / (n1 - n0)

    def step(self, kv_length: float | None = None) -> float:
        """Seconds of a plain decoding step."""
        return self.plain_s + self.forward(1, kv_length) - self.forward(1)

    def v(self, n: float, kv_length: float | None = None) -> float:
        """v(n) in plain steps, of a step that has n rows and not one: v(1) = 1."""
        return 1.0 + (self.forward(n, kv_length) - self.forward(1, kv_length)) / self.step(kv_length)

    def overhead(self, gamma: int, kv_length: float | None = None) -> float:
        """c0: verdict, commit and counters of a round of gamma tokens, in plain steps."""
        return (self.round_s + self.round_token_s * gamma) / self.step(kv_length)

    def round(self, rows: float, room: int, kv_length: float | None = None) -> float:
        """Seconds of a round that verifies `rows` rows, of a loop with room for `room` drafted ones; no drafting."""
        return self.v(rows, kv_length) * self.step(kv_length) + self.round_s + self.round_token_s * room

    def draft_cost(self, drafter: str | None) -> DraftCost:
        """Of a drafter by name; `FREE` where it was not measured."""
        return self.drafts.get(drafter or "", FREE)

    def predict(
        self, alpha: float, gamma: int, *, draft: DraftCost = FREE, kv_length: float | None = None, share: float = 1.0
    ) -> float:
        """Predicted speed-up of drafts of gamma tokens at acceptance alpha: E[tokens] / (v(gamma+1) + gamma c + c0).

        Rounds beyond the `share` that drafts are plain steps.
        """
        step = self.step(kv_length)
        return expected.predicted_speedup(
            alpha,
            gamma,
            lambda n: self.v(n, kv_length),
            c=draft.token_s / step,
            c0=self.overhead(gamma, kv_length) + draft.fixed_s / step,
            share=share,
        )

    def predict_tree(
        self, tokens: float, nodes: float, *, room: int, draft: DraftCost = FREE, kv_length: float | None = None
    ) -> float:
        """Predicted speed-up of trees that give so many tokens a round: tokens / (v(nodes + 1) + draft + c0).

        Args:
            tokens: emitted a round.
            nodes: drafted a round.
            room: most nodes.
            draft: of a whole tree, all of it by the round.
            kv_length: tokens in the cache.
        """
        step = self.step(kv_length)
        c0 = draft.fixed_s / step + self.overhead(room, kv_length)
        return tokens / expected.round_cost(lambda n: self.v(n, kv_length), nodes, c=draft.token_s / step, c0=c0)

    def best_gamma(
        self,
        alpha: float,
        *,
        draft: DraftCost = FREE,
        kv_length: float | None = None,
        most: int = 16,
        share: float = 1.0,
    ) -> tuple[int, float]:
        """The draft length of the highest predicted speed-up, and that speed-up; (0, 1) where none pays."""
        costs = {"draft": draft, "kv_length": kv_length, "share": share}
        found = [(g, self.predict(alpha, g, **costs)) for g in range(1, most + 1)]
        best = max(found, key=lambda pair: pair[1])
        return best if best[1] > 1 else (0, 1.0)

    def policy_options(
        self, gamma: int, drafter: str | None = None, *, kv_length: float | None = None, batch: int = 1
    ) -> dict[str, object]:
        """The options `v`, `c`, `c0` of the policies `cost` and `auto_off`, for drafts of up to gamma tokens.

        In steps of `batch` sequences, v(n) is v(batch n) / v(batch); drafting is taken to grow as a step does.
        """
        draft, step, together = self.draft_cost(drafter), self.step(kv_length), self.v(batch, kv_length)
        return {
            "v": [max(self.v(batch * n, kv_length) / together, 1e-3) for n in range(1, gamma + 2)],
            "c": draft.token_s / step,
            "c0": self.overhead(gamma, kv_length) + draft.fixed_s / step,
        }

    def with_draft(self, name: str, cost: DraftCost) -> "CostTable":
        """The table with one drafter more."""
        return dataclasses.replace(self, drafts={**self.drafts, name: cost})

    def with_acceptance(self, name: str, rates: tuple[float, ...]) -> "CostTable":
        """The table with one acceptance more."""
        return dataclasses.replace(self, acceptance={**self.acceptance, name: rates})

    def tree_options(
        self, nodes: int, drafter: str | None = None, *, kv_length: float | None = None
    ) -> dict[str, object]:
        """The options `cost`, `level_cost` of the tree `sequoia`, for trees of up to `nodes` nodes, in plain steps."""
        draft, step = self.draft_cost(drafter), self.step(kv_length)
        fixed = draft.fixed_s / step
        rounds = [self.v(n + 1, kv_length) + self.overhead(n, kv_length) + fixed for n in range(nodes + 1)]
        return {"cost": [max(t, 1e-3) for t in rounds], "level_cost": draft.token_s / step}

    def to_dict(self) -> dict[str, object]:
        """As plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "CostTable":
        """The inverse of `to_dict`.

        Raises:
            TypeError, ValueError, KeyError: the values are not a table.
        """
        given = dict(values)
        given["ns"] = tuple(int(n) for n in given["ns"])
        given["forward_s"] = tuple(float(t) for t in given["forward_s"])
        given["drafts"] = {name: DraftCost(**cost) for name, cost in given.get("drafts", {}).items()}
        given["acceptance"] = {key: tuple(map(float, rates)) for key, rates in given.get("acceptance", {}).items()}
        shares = given.get("windows", {}).get("shares", WHOLE.shares)
        given["windows"] = LayerWindows(tuple((int(window), float(share)) for window, share in shares))
        return cls(**given)
