"""The contract of a verifier, for anybody's own: `check_verifier(get_verifier("mine:Rule"))` is one line in a test."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.speculative.base import Draft, DraftKind, Verdict, Verifier
from specsparse.speculative.proof.certify import cases, certify
from specsparse.speculative.proof.driver import Decided, Drafts, sound
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verify import Noise, Target

VOCAB, GAMMA, BATCH = 3, 2, 4


def check_verifier(verifier: Verifier) -> None:
    """Refuses a verifier that breaks the contract of `speculative.base`, or its promise.

    Args:
        verifier: yours.

    Raises:
        AssertionError: says what is broken.
    """
    for check in VERIFIER_CHECKS:
        check(verifier)


def static_and_named(verifier: Verifier) -> None:
    """It is hashable, has a name, and names its kinds of drafts."""
    assert hash(verifier) == hash(verifier), "its hash changes"
    assert verifier.name and isinstance(verifier.name, str), f"its name is {verifier.name!r}"
    kinds = verifier.kinds
    assert kinds and all(isinstance(kind, DraftKind) for kind in kinds), f"kinds are {kinds!r}: some DraftKinds"


def every_round_ends_somewhere(verifier: Verifier) -> None:
    """The ways a round can end have the probability 1 in all, and each ends in a distribution."""
    for case in cases(verifier, vocab=VOCAB, gamma=GAMMA, seed=0):
        for outcome in case.outcomes():
            found = verifier.rule.ends(outcome.draft, outcome.p)
            total = sum(end.weight for end in found)
            assert abs(total - 1) < 1e-9, f"on {case.name} drafts the ends of a round have the probability {total:g}"
            masses = [float(end.probs.sum()) for end in found if end.weight > 1e-12]
            assert np.allclose(masses, 1, atol=1e-9), f"on {case.name} drafts a round's ends have the masses {masses}"


def verdicts_are_paths(verifier: Verifier) -> None:
    """A verdict names a path of the draft, its tokens and one more, and no row depends on the batch around it."""
    run = jax.jit(functools.partial(_verdict, verifier))
    first, tree = next(kind for kind in DraftKind if kind in verifier.kinds), TreeTemplate.kary((2, 1))
    for kind in verifier.kinds:
        several = verifier.tree and kind is not DraftKind.SAMPLED  # one program for a chain and a tree of one size
        for template in [TreeTemplate.chain(tree.size), tree] if several else [TreeTemplate.chain(GAMMA)]:
            for seed in range(4):
                drafts, uniforms = _random(template, kind, seed)
                verdict = jax.tree.map(np.asarray, run(drafts.draft, drafts.p, uniforms))
                rows = (np.asarray(getattr(verdict, name)) for name in ("tokens", "count", "nodes", "failed"))
                index = np.arange(BATCH)
                assert sound(drafts, Decided(index, np.ones(BATCH), *rows)).all(), f"{verdict}: no path and its tokens"
                for b in range(BATCH):
                    alone = kind is first and not seed  # another size of batch is another program
                    at = [b] if alone else [b] * BATCH
                    one = jax.tree.map(lambda x, at=at: x[at], (drafts.draft, drafts.p, uniforms))
                    same = jax.tree.map(lambda x, y, at=at: np.array_equal(x[at], y), verdict, run(*one))
                    assert all(jax.tree.leaves(same)), "a verdict depends on the batch around it"


def the_promise_is_kept(verifier: Verifier) -> None:
    """A lossless one gives the target's distribution, by enumeration of its rule and then of the driver."""
    for driver in (False, True) if verifier.lossless else ():
        report = certify(verifier, vocab=VOCAB, gamma=GAMMA, mutants=False, driver=driver)
        assert report.passed, f"it is not lossless: {'; '.join(report.failures[:3])}"


VERIFIER_CHECKS = (static_and_named, every_round_ends_somewhere, verdicts_are_paths, the_promise_is_kept)
"""The parts of the contract, each a function of a `Verifier`."""


def _verdict(verifier: Verifier, draft: Draft, p_BnV: jax.Array, uniforms_Bn: jax.Array) -> Verdict:
    K = draft.max_nodes
    below_BnV = jnp.cumsum(p_BnV, axis=2) <= uniforms_Bn[:, :, None]
    tokens_Bn = jnp.minimum(below_BnV.sum(axis=2), VOCAB - 1).astype(jnp.int32)
    target = Target(p_BnV, tokens_Bn, tree=verifier.tree)
    return verifier.rule.verdict(draft, target, Noise(uniforms_Bn[:, :K], uniforms_Bn[:, K]))


def _random(template: TreeTemplate, kind: DraftKind, seed: int) -> tuple[Drafts, np.ndarray]:
    """Drafts and targets of random distributions, some with fewer nodes than there is room for, and uniforms."""
    rng, K = np.random.default_rng(seed), template.size
    p_BnV, q_BKV = (rng.dirichlet(np.ones(VOCAB), (BATCH, rows)).astype(np.float32) for rows in (K + 1, K))
    draft = Draft(
        jnp.asarray(rng.integers(0, VOCAB, (BATCH, K), np.int32)),
        jnp.tile(jnp.array(template.parents, jnp.int32), (BATCH, 1)),
        jnp.asarray(rng.integers(0, K + 1, BATCH), jnp.int32),
        None if kind is DraftKind.ONE_HOT else jnp.asarray(q_BKV),
    )
    return Drafts(jax.tree.map(np.asarray, draft), p_BnV), rng.uniform(0, 1, (BATCH, K + 1)).astype(np.float32)
