"""The engine's driver against the certificate: every coin interval, every token of every end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.speculative.base import PAD, Draft, DraftKind
from specsparse.speculative.proof.cases import make_case
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS
from specsparse.speculative.verifiers.draft_rules import match_verdict
from tests.cells import cells
from tests.speculative.verdicts import verify

CHAIN, TREE, BUSH = TreeTemplate.chain(3), TreeTemplate.kary((2, 1)), TreeTemplate.kary((2, 3))
EDGE = 1e-3  # how near to the end of a coin's interval the engine is probed, as a share of it
LEAST = 1e-5  # ends and tokens rarer than this are left to the certificate: float32 may round them away

POINTS = [
    ("token", DraftKind.SAMPLED, CHAIN, "random"),
    ("token", DraftKind.SAMPLED, CHAIN, "truncated differently"),
    ("block", DraftKind.SAMPLED, CHAIN, "random"),
    ("block", DraftKind.SAMPLED, CHAIN, "q truncated"),
    ("block", DraftKind.ONE_HOT, CHAIN, "random"),
    ("block", DraftKind.ONE_HOT, CHAIN, "p truncated"),
    ("match", DraftKind.SAMPLED, CHAIN, "random"),
    ("delta", DraftKind.ONE_HOT, CHAIN, "random"),
    ("mss", DraftKind.IID, BUSH, "random"),
    ("wor", DraftKind.WOR, TREE, "q truncated"),
    ("kseq", DraftKind.IID, BUSH, "random"),
    ("tree_delta", DraftKind.ONE_HOT, BUSH, "random"),
    ("tree_match", DraftKind.IID, BUSH, "p truncated"),
    ("typical", DraftKind.IID, TREE, "random"),
    ("threshold", DraftKind.IID, TREE, "random"),
]


def probes(rule, outcome):
    """(end, coins, u, token): both edges of each coin's interval and the middle of each token's."""
    K = outcome.draft.max_nodes
    for end in rule.ends(outcome.draft, outcome.p):
        if end.weight < LEAST:
            continue
        cdf = np.cumsum(end.probs)
        for share in (EDGE, 1 - EDGE):
            coins = np.full(K, 0.5)
            for node, chance, passed in end.coins:
                coins[node] = share * chance if passed else chance + share * (1 - chance)
            for x in np.flatnonzero(end.probs > LEAST):
                yield end, coins, (cdf[x] - end.probs[x] / 2) / cdf[-1], int(x)


def target_tokens(rng, outcome, end, token):
    """The target's sample at each row: along the path, then `token`; anything elsewhere."""
    target = rng.integers(0, outcome.p.shape[1], outcome.draft.max_nodes + 1)
    rows = [0, *(node + 1 for node in end.path)]
    target[rows[:-1]] = outcome.draft.tokens[list(end.path)]
    target[rows[-1]] = token
    return target


# Chains and trees judged by distributions and by tokens, and what is lossy; the distribution of each lossless verdict
# that runs is enumerated in proof/test_driver.py.
ORDINARY = [
    p for p in POINTS if p[0] in ("match", "mss", "typical", "threshold") or (p[0] == "block" and p[3] == "random")
]


@pytest.mark.parametrize(("name", "kind", "template", "corner"), cells(POINTS, ORDINARY))
def test_every_coin_interval(name, kind, template, corner):
    verifier = VERIFIERS[name]
    rng = np.random.default_rng(0)
    case = make_case(corner, kind, template, vocab=4 if template != BUSH else 3, seed=11)
    every = list(case.outcomes())
    picked = [every[i] for i in rng.permutation(len(every))[:5]]
    tried = [(o, *probe) for o in picked for probe in probes(verifier.rule, o)]
    drafts = [o.draft for o, *_ in tried]
    f32, i32 = functools.partial(jnp.asarray, dtype=jnp.float32), functools.partial(jnp.asarray, dtype=jnp.int32)
    draft = Draft(
        i32(np.stack([d.tokens for d in drafts])),
        i32(np.stack([d.parents for d in drafts])),
        i32(np.stack([d.count for d in drafts])),
        None if drafts[0].q is None else f32(np.stack([d.q for d in drafts])),
    )
    if verifier.needs_p:
        run = jax.jit(functools.partial(verify, verifier))
        p = f32(np.stack([o.p for o, *_ in tried]))
        verdict = run(draft, p, coins_BK=f32(np.stack([t[2] for t in tried])), u_B=f32([t[3] for t in tried]))
    else:
        targets = [target_tokens(rng, o, end, x) for o, end, _, _, x in tried]
        verdict = jax.jit(functools.partial(match_verdict, tree=verifier.tree))(draft, i32(np.stack(targets)))
    verdict = jax.tree.map(np.asarray, verdict)
    assert not verdict.failed.any()
    for b, (outcome, end, _, _, token) in enumerate(tried):
        path, K = list(end.path), template.size
        emitted = [*outcome.draft.tokens[path], token]
        np.testing.assert_array_equal(verdict.nodes[b], path + [PAD] * (K - len(path)))
        np.testing.assert_array_equal(verdict.tokens[b], emitted + [PAD] * (K + 1 - len(emitted)))
        assert verdict.accepted[b] == len(path)
        assert verdict.count[b] == len(path) + 1
        leaf = not template.children[path[-1] + 1 if path else 0]
        assert verdict.tested[b] == len(path) + (not leaf)
