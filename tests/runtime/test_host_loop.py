"""The host loop says what the loop in one program says, and times its stages."""

import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.runtime import metrics
from specsparse.speculative.base import ROOT
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.testing import write_tiny_gguf
from tests.cells import cells

VOCAB = 300
PROMPTS = ["hello world hello", "abcabcabcabc"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return specsparse.load(write_tiny_gguf(path, n_layers=1, vocab_size=VOCAB, context_length=96))


def drafter(name):
    if name == "tree":
        return get_drafter("scripted", template=TreeTemplate.kary((2, 1)), ends=(2, ROOT), vocab_size=VOCAB)
    return get_drafter(name, gamma=3)


ALPHAS = [
    ({"drafter": "prompt_lookup", "verifier": "greedy"}, None),
    ({"drafter": "prompt_lookup", "verifier": "block", "temperature": 0.8}, None),
    ({"drafter": "prompt_lookup", "verifier": "match", "temperature": 0.8}, (0.0, 1.0)),
    ({"drafter": "prompt_lookup", "verifier": "delta", "temperature": 0.8}, (0.0, 1.0)),
    ({"drafter": "synthetic", "verifier": "synthetic", "temperature": 0.0}, (0.0, 0.0)),
]


# None, a chance and 0 stay, of argmax drafts under verifiers that weigh them; tests/contracts has alpha of `match`.
@pytest.mark.parametrize(("options", "alpha"), cells(ALPHAS, [ALPHAS[1], ALPHAS[3], ALPHAS[4]]))
def test_alpha_is_none_where_the_verifier_has_none_and_zero_where_it_is_zero(model, options, alpha):
    more = {"rate": 0.0} if options["drafter"] == "synthetic" else {}
    options = {**options, "drafter": get_drafter(options["drafter"], gamma=3, **more)}
    counters = specsparse.generate(model, PROMPTS[1], max_tokens=16, ignore_eos=True, seed=0, **options).stats.counters
    counters.validate()
    found = metrics.rates(counters)["alpha"]
    assert counters.num_tested > 0
    assert found is None if alpha is None else alpha[0] <= found <= alpha[1]


LOOPS = [
    ("prompt_lookup", "greedy", 0.0), ("prompt_lookup", "match", 0.8), ("prompt_lookup", "delta", 0.8),
    ("tree", "tree_match", 1.0), ("layer_skip", "greedy", 0.0), ("layer_skip", "delta", 0.8),
]  # fmt: skip


# A tree, and a chain of the target's own; verdicts by tokens and by distributions. Greedy lookup: test_kinds.py.
@pytest.mark.parametrize(("name", "verifier", "temperature"), cells(LOOPS, [LOOPS[3], LOOPS[5]]))
def test_the_same_tokens_and_counters(model, name, verifier, temperature):
    sampling = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, repetition_penalty=1.1)
    options = {"sampling": sampling, "drafter": drafter(name), "verifier": verifier, "seed": 4}
    one = specsparse.generate(model, PROMPTS, **options)
    seen = []
    host = specsparse.generate(model, PROMPTS, **options, watch=seen.append)
    assert [g.token_ids for g in host] == [g.token_ids for g in one]
    assert [g.token_sources for g in host] == [g.token_sources for g in one]
    for a, b in zip(host, one, strict=True):
        times, c = a.stats.counters.times, b.stats.counters
        assert min(times.draft, times.verify, times.sample, times.commit, times.host) > 0
        assert (c.num_rounds, c.num_accepted_tokens, c.alpha) == (
            a.stats.counters.num_rounds, a.stats.counters.num_accepted_tokens, a.stats.counters.alpha,
        )  # fmt: skip
        # The budget of a draft ends where the text does, so that every accepted token is in it.
        positions = [origin.position for origin in b.token_sources if origin.kind == "accepted"]
        assert [positions.count(k + 1) for k in range(len(c.num_accepted_tokens_per_pos))] == list(
            c.num_accepted_tokens_per_pos
        )
        assert len(b.token_sources) - len(positions) == c.num_rounds  # each round ends in a token of the target's own
    assert [view.number for view in seen] == list(range(max(g.stats.counters.num_rounds for g in host)))
    for view in seen:
        grown = np.asarray(view.after.length) - np.asarray(view.before.length)
        assert (view.cache_after - view.cache_before == grown).all()


def test_plain_decoding_can_be_stepped_too(model):
    plain = specsparse.generate(model, PROMPTS[0], max_tokens=12)
    assert specsparse.generate(model, PROMPTS[0], max_tokens=12, loop="host").token_ids == plain.token_ids


def test_an_unknown_loop_is_refused(model):
    with pytest.raises(specsparse.errors.UserError, match="loop='gpu' must be one of jit, host"):
        specsparse.generate(model, "a", loop="gpu")
