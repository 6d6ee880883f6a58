"""Recorded distributions at another temperature: right where the record says enough, refused where it does not."""

import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.measure.recording import Recording
from specsparse.tools.replay.replay import MOST_REST, at_temperature

VOCAB = 200


def record(probs_V, kept, *, vocab=VOCAB, rest=None, temperature=1.0):
    """One round without a draft, of whose distribution the first `kept` tokens are recorded."""
    none, one = np.zeros((1, 0), np.int32), np.zeros(1, np.int32)
    about = {"vocab": vocab, "temperature": temperature, "truncated": False, "tree": False, "depth": 1}
    rest = probs_V[kept:].sum() if rest is None else rest
    return Recording(
        about, one, one, one, one, one, none, none, np.zeros((1, 1), np.int32), none.astype(np.float32),
        np.arange(kept, dtype=np.int32)[None, None], probs_V[None, None, :kept].astype(np.float32),
        np.full((1, 1), rest, np.float32),
    )  # fmt: skip


def steep(slope):
    probs_V = np.exp(-slope * np.arange(VOCAB))
    return probs_V / probs_V.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.25])
def test_a_record_of_few_tokens_gives_the_distribution_of_all(temperature):
    probs_V = steep(2.0)
    exact_V = probs_V ** (1 / temperature) / (probs_V ** (1 / temperature)).sum()
    found = at_temperature(record(probs_V, 8), temperature)
    assert np.abs(found.p[0, 0] - exact_V[:8]).sum() + abs(found.p_rest[0, 0] - exact_V[8:].sum()) < 2 * MOST_REST


def test_how_much_the_rest_may_come_to_depends_on_how_many_tokens_share_it():
    """m = 3e-4, power 0.9: one token would have a share of 0.07 %, the 192 others up to 0.11 %, 12 of them 0.09 %."""
    probs_V = np.full(VOCAB, 3e-4 / (VOCAB - 8))
    probs_V[0], probs_V[1:8] = 1 - 3e-4 - 7e-9, 1e-9
    few = record(probs_V, 8)
    with pytest.raises(UserError, match=r"^temperature=1.11111 .*: up to 0.1% of p may lie beyond the recorded"):
        at_temperature(few, 1 / 0.9)
    assert at_temperature(record(probs_V, 8, vocab=20), 1 / 0.9).p_rest[0, 0] < MOST_REST
    assert at_temperature(few, 0.9).p_rest[0, 0] < 3e-4


def test_rounding_is_no_tail_where_the_whole_distribution_is_kept():
    probs_V = steep(0.01)
    found = at_temperature(record(probs_V, VOCAB, rest=1e-9), 20.0)
    assert found.p_rest[0, 0] == 0 and found.p.sum() == pytest.approx(1)
    np.testing.assert_allclose(found.p[0, 0], probs_V**0.05 / (probs_V**0.05).sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "why"), [({"temperature": 0.0}, "it was greedy"), ({"truncated": True}, "p was truncated")]
)
def test_what_has_no_other_temperature(change, why):
    few = record(steep(2.0), 8)
    few.about.update(change)
    with pytest.raises(UserError, match=why):
        at_temperature(few, 0.5)
    for none in (0.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="a number above 0"):
            at_temperature(record(steep(2.0), 8), none)
