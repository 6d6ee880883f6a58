"""`kseq` and `tree_delta` through the whole engine with drafters that have a model, and alpha of `match`."""

import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.runtime import metrics
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees import get_tree
from specsparse.testing import write_tiny_gguf
from tests.cells import cells

PROMPTS = ["hello world hello", "abcabcabcabc"]
SHAPE = {"quant": "Q4_0", "d_model": 64, "d_ff": 96, "n_layers": 2, "vocab_size": 300, "context_length": 96}
SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, ignore_eos=True)
TREES = {"kseq": ("sampled_iid", {"temperature": 0.8}), "tree_delta": ("static", {})}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    if not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    return specsparse.load(write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", **SHAPE))


def drafter(target, source, verifier):
    """The target itself as a draft model, at a temperature of its own, or one of its layers."""
    tree, options = TREES[verifier]
    own = {"model": target} if source == "model" else {"layers": [0]}
    return get_drafter(source, **own, **options, tree=get_tree(tree, widths=(3, 1)))


MATRIX = [(source, verifier) for source in ("layer_skip", "model") for verifier in TREES]


@pytest.mark.parametrize(("source", "verifier"), cells(MATRIX, [("layer_skip", "kseq"), ("model", "tree_delta")]))
def test_some_drafts_are_accepted_and_neighbours_do_not_matter(target, source, verifier):
    options = {"sampling": SAMPLING, "drafter": drafter(target, source, verifier), "verifier": verifier}
    options |= {"seed": 3, "common_noise": True}  # without it a prompt's noise goes with its place
    both = specsparse.generate(target, PROMPTS, **options)
    swapped = specsparse.generate(target, PROMPTS[::-1], **options)
    assert [g.token_ids for g in both] == [g.token_ids for g in swapped[::-1]]
    counters = both[0].stats.counters + both[1].stats.counters
    assert 0 < counters.num_accepted_tokens < counters.num_tested
    assert all(len(g.token_ids) == 40 for g in both)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", TREES)
def test_the_first_token_follows_the_distribution(target, verifier):
    """600 samples in one batch: the share of the five likeliest tokens lies within five standard deviations."""
    count = 600
    sampling = SAMPLING.merged(max_tokens=3, temperature=1.0, top_p=0.6)
    options = {"drafter": drafter(target, "layer_skip", verifier), "verifier": verifier, "seed": 0}
    rows = specsparse.generate(target, PROMPTS[0], sampling=sampling.merged(n=count), **options)
    plain = specsparse.generate(target, PROMPTS[0], sampling=sampling.merged(n=count), seed=1)
    seen = np.bincount([g.token_ids[0] for g in rows], minlength=300)
    wanted = np.bincount([g.token_ids[0] for g in plain], minlength=300)
    for token in np.argsort(-wanted)[:5]:
        p = (seen[token] + wanted[token]) / (2 * count)
        assert abs(seen[token] - wanted[token]) < 5 * np.sqrt(2 * count * p * (1 - p))


@pytest.mark.parametrize("source", cells(["layer_skip", "prompt_lookup"], ["layer_skip"]))
def test_alpha_of_match_is_what_was_accepted(target, source):
    """Chains under `match` at T > 0: sum of sum_x p q over tested positions, beside the accepted ones (z under 4)."""
    options = {"sampling": SAMPLING.merged(n=64, temperature=1.0), "verifier": "match", "seed": 2}
    more = {"layers": [0, 1], "temperature": 1.0} if source == "layer_skip" else {}
    rows = specsparse.generate(target, PROMPTS[1], drafter=get_drafter(source, gamma=3, **more), **options)
    found = metrics.rates(sum((g.stats.counters for g in rows[1:]), rows[0].stats.counters))
    assert 0 < found["alpha"] < 1 and abs(found["alpha_z"]) < 4


def test_alpha_of_greedy_is_none(target):
    greedy = specsparse.generate(target, PROMPTS[1], drafter="prompt_lookup", temperature=0.0, max_tokens=20)
    assert metrics.rates(greedy.stats.counters)["alpha"] is None


def test_a_pair_that_does_not_fit_is_refused_with_the_valid_names(target):
    with pytest.raises(UserError, match=r"verifier=kseq cannot verify one_hot tree drafts.*choose one of tree_match"):
        specsparse.generate(
            target, "abc", drafter=drafter(target, "layer_skip", "tree_delta"), verifier="kseq", sampling=SAMPLING
        )
