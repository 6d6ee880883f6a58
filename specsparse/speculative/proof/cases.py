"""Random targets and drafters on a tiny vocabulary, and every draft they can make."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from specsparse.speculative.base import ROOT, Draft, DraftKind
from specsparse.speculative.proof.exact import Outcome
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import residuals

Tables = list[np.ndarray]
"""Entry d, shape [V] * (d + 1): the distribution of the next token after each context of d tokens."""

Change = Callable[[np.ndarray], np.ndarray]
"""float64[V] -> float64[V], both distributions."""

Corner = Callable[[Tables, Tables], tuple[Tables, Tables]]
"""(p, q) of independent random distributions -> (p, q) of the corner."""

RowProbs = Callable[[int, tuple[int, ...], tuple[int, ...]], np.ndarray]
"""(node, context tokens, tokens of its elder siblings) -> float64[V]."""


def random_tables(rng: np.random.Generator, *, vocab: int, depth: int, concentration: float = 0.8) -> Tables:
    """Independent Dirichlet distributions after every context of 0..depth tokens."""
    return [rng.dirichlet(np.full(vocab, concentration), size=(vocab,) * d) for d in range(depth + 1)]


def map_tables(tables: Tables, change: Change) -> Tables:
    """Applies a change of one distribution to all of them."""
    return [np.apply_along_axis(change, -1, table) for table in tables]


def tempered(temperature: float) -> Change:
    def change(probs_V):
        hot = probs_V ** (1 / temperature)
        return hot / hot.sum()

    return change


def keep_top(k: int) -> Change:

    def change(probs_V):
        kept = np.where(probs_V >= np.sort(probs_V)[-min(k, probs_V.shape[0])], probs_V, 0.0)
        return kept / kept.sum()

    return change


def ranked(probs_V: np.ndarray, rank: int) -> np.ndarray:
    """One-hot distribution of the token of that rank (0 the likeliest)."""
    return residuals.one_hot(probs_V, np.argsort(-probs_V, kind="stable")[rank % probs_V.shape[0]])


def tie_top(probs_V: np.ndarray) -> np.ndarray:
    """The distribution whose two likeliest tokens are equally likely."""
    top = np.argsort(-probs_V, kind="stable")[:2]
    tied_V = probs_V.copy()
    tied_V[top] = probs_V[top].mean()
    return tied_V


def draw_probs(kind: DraftKind, q: Tables) -> RowProbs:
    """The distribution a node is drawn from when a draft of that kind is made with q."""

    def probs(node, context, elders):
        row = q[len(context)][context]
        if kind is DraftKind.ONE_HOT:
            return ranked(row, len(elders))
        if kind is DraftKind.WOR:
            for token in elders:
                row = residuals.remove(row, token)
        return row

    return probs


def draw_rows(kind: DraftKind, q_NV: np.ndarray, elders_NE: np.ndarray) -> np.ndarray:
    """float64[N, V]: `draw_probs` of N drafts at once, from the drafter's distributions and the elder siblings."""
    if kind is DraftKind.ONE_HOT:
        rank_N = np.argsort(-q_NV, axis=1, kind="stable")[:, elders_NE.shape[1] % q_NV.shape[1]]
        return (np.arange(q_NV.shape[1]) == rank_N[:, None]).astype(np.float64)
    if kind is DraftKind.WOR and elders_NE.shape[1]:
        rest_NV = np.where((elders_NE[:, :, None] == np.arange(q_NV.shape[1])).any(axis=1), 0.0, q_NV)
        left_N1 = rest_NV.sum(axis=1, keepdims=True)
        return rest_NV / np.where(left_N1 > 0, left_N1, 1)
    return q_NV


def outcomes(
    template: TreeTemplate, p: Tables, *, draw: RowProbs, record: RowProbs | None = None, one_hot: bool = False
) -> Iterator[Outcome]:
    """Every draft with its probability and the verifier's view of p.

    Args:
        template: shape of the draft.
        p: tables of the distribution the verifier uses.
        draw: distribution a node is drawn from.
        record: distribution written into the draft; `draw` if None.
        one_hot: leave q out, as one-hot drafts do.

    An empty draft is one node that does not exist, as rules get one.
    """
    parents, count = np.array(template.parents, np.int32), np.int32(template.size)
    if not template.size:
        q_KV = None if one_hot else p[0][None]
        yield Outcome(1.0, Draft(np.zeros(1, np.int32), np.full(1, ROOT, np.int32), count, q_KV), np.stack([p[0]] * 2))
        return

    def ways(node, weight, tokens, rows):
        """(probability, tokens, recorded distribution of each node) of every way to draw the nodes from `node` on."""
        if node == template.size:
            yield weight, tokens, rows
            return
        parent = template.parents[node]
        context = tuple(tokens[i] for i in template.path(parent))
        elders = tuple(tokens[i] for i in template.children[parent + 1] if i < node)
        probs_V, row_V = draw(node, context, elders), (record or draw)(node, context, elders)
        if not probs_V.any():  # without replacement, more siblings than tokens
            probs_V = residuals.one_hot(probs_V, 0)
        for x in np.flatnonzero(probs_V):
            yield from ways(node + 1, weight * probs_V[x], (*tokens, int(x)), [*rows, row_V])

    for weight, tokens, rows in ways(0, 1.0, (), []):
        contexts = [tuple(tokens[i] for i in template.path(row - 1)) for row in range(template.size + 1)]
        p_nV = np.stack([p[len(context)][context] for context in contexts])
        q_KV = None if one_hot else np.stack(rows)
        yield Outcome(weight, Draft(np.array(tokens, np.int32), parents, count, q_KV), p_nV)


@dataclasses.dataclass(frozen=True)
class Case:
    """A target, a drafter, and the shape and kind of its drafts."""

    name: str  # which corner it covers
    kind: DraftKind  # how drafts are drawn
    template: TreeTemplate  # shape of the draft
    p: Tables  # target tables, to depth `template.max_depth`
    q: Tables  # draft tables

    @property
    def length(self) -> int:
        """Tokens whose joint distribution is compared: the most a round can emit."""
        return self.template.max_depth + 1

    def after(self, context: tuple[int, ...]) -> "Case":
        """The case behind some tokens, to which the tables must reach."""
        behind = ([table[context] for table in tables[len(context) :]] for tables in (self.p, self.q))
        return dataclasses.replace(self, **dict(zip("pq", behind)))

    def outcomes(self) -> Iterator[Outcome]:
        one_hot = self.kind is DraftKind.ONE_HOT
        return outcomes(self.template, self.p, draw=draw_probs(self.kind, self.q), one_hot=one_hot)


def at_temperature_0(case: Case) -> Case:
    """The case with one-hot distributions of the target; of tied tokens the first is the likeliest."""
    return dataclasses.replace(case, p=map_tables(case.p, lambda probs: ranked(probs, 0)))


def _changes(*, p: Change | None = None, q: Change | None = None) -> Corner:
    """The corner in which each distribution of the target, and of the draft, is changed alike."""

    def changed(tables: Tables, change: Change | None) -> Tables:
        return map_tables(tables, change) if change else tables

    return lambda tables_p, tables_q: (changed(tables_p, p), changed(tables_q, q))


def _every_second(first: int) -> Change:
    def change(probs_V):
        kept = np.where(np.arange(probs_V.shape[0]) % 2 == first, probs_V, 0.0)
        return kept / kept.sum()

    return change


def _flat(probs_V: np.ndarray) -> np.ndarray:
    return np.full_like(probs_V, 1 / probs_V.shape[0])


def _towards_top(probs_V: np.ndarray) -> np.ndarray:
    """Halfway to the likeliest token alone: drawn from it that token may be rejected, and no other."""
    return (probs_V + ranked(probs_V, 0)) / 2


def _off_top(probs_V: np.ndarray) -> np.ndarray:
    """Half the likeliest token's mass lies on all others alike: of p itself that token alone may be rejected."""
    moved = probs_V[np.argmax(probs_V)] / 2
    return np.where(np.arange(probs_V.shape[0]) == np.argmax(probs_V), moved, probs_V + moved / (probs_V.shape[0] - 1))


CORNERS: dict[str, Corner] = {
    "random": _changes(),
    "p equals q": lambda p, q: (p, p),
    "p equals q at the root": lambda p, q: (p, [p[0], *q[1:]]),
    "p truncated": _changes(p=keep_top(2)),
    "q truncated": _changes(q=keep_top(2)),
    "truncated differently": _changes(p=keep_top(3), q=keep_top(2)),
    "q heated": _changes(q=tempered(2.0)),
    "cold": _changes(p=tempered(0.1), q=tempered(0.1)),
    "disjoint supports": _changes(p=_every_second(0), q=_every_second(1)),
    "one token each": _changes(p=keep_top(1), q=keep_top(1)),
    "q one token": _changes(q=keep_top(1)),
    "p tied, q on one of them": lambda p, q: _changes(p=tie_top, q=lambda x: _towards_top(tie_top(x)))(p, p),
    "p flat, q tied": _changes(p=_flat, q=tie_top),
    "q tied, p off one of them": lambda p, q: _changes(p=lambda x: _off_top(tie_top(x)), q=tie_top)(q, q),
}
"""Corners of (p, q) by name: 0/0 residuals, zeros, supports that differ or never meet, one-hot distributions, ties."""


def make_case(corner: str, kind: DraftKind, template: TreeTemplate, *, vocab: int, seed: int) -> Case:
    """The case of that corner with random context-dependent distributions; the same seed gives the same case."""
    rng = np.random.default_rng([seed, vocab, template.size])
    p, q = (random_tables(rng, vocab=vocab, depth=template.max_depth) for _ in range(2))
    return Case(corner, kind, template, *CORNERS[corner](p, q))
