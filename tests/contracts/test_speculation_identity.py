"""Speculative decoding with `greedy`, `match` and their tree forms emits the tokens of plain decoding, one for one.

Promised at every temperature, under truncation and penalties, for drafts that are right, wrong or in between, for
chains and trees, batches, stop ids and full contexts: with the target's noise keyed by absolute position, acceptance
decides how fast the text comes and never what it says.
"""

import functools

import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.speculative.base import ROOT
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.testing import write_tiny_gguf
from tests.cells import cells

PROMPTS = ["hello world hello", "abcabcabcabc", "the"]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    "sharp": SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1,
        max_tokens=60, ignore_eos=True,
    ),
    "warm": SamplingParams(temperature=1.0, top_p=0.95, min_p=0.02, bad_words=["the"], min_tokens=20, max_tokens=60),
}  # fmt: skip
TREE = TreeTemplate.kary((2, 2, 1))
VOCAB = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "m.gguf", quant="Q4_0", d_model=64, d_ff=96, n_layers=1, vocab_size=VOCAB,
        context_length=96,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(path):
    """By the best kernels there are."""
    return specsparse.load(path)


@pytest.fixture(scope="module")
def plain(model) -> dict:
    """Plain decoding of the batch under each distribution."""
    return {
        name: specsparse.generate(model, PROMPTS, sampling=sampling, seed=11) for name, sampling in SAMPLINGS.items()
    }


def drafters(truth: tuple[int, ...]) -> dict:
    """Chains and trees that are right now and then. The truth is that of the first sequence; the others mostly miss."""
    return {
        "prompt_lookup": get_drafter("prompt_lookup", gamma=4, ngram_max=2),
        "chain": get_drafter("scripted", gamma=5, accept=(5, 0, 3, 1), vocab_size=VOCAB, truth=truth),
        "tree": get_drafter("scripted", template=TREE, ends=(6, ROOT, 1, 3), vocab_size=VOCAB, truth=truth),
    }


def same(got, wanted, *, drafted: bool = True) -> None:
    assert [g.token_ids for g in got] == [g.token_ids for g in wanted]
    assert [(g.text, g.finish_reason) for g in got] == [(g.text, g.finish_reason) for g in wanted]
    if drafted:
        assert sum(g.stats.counters.num_draft_tokens for g in got) > 0


MATRIX = [(drafter, sampling) for drafter in ("prompt_lookup", "chain", "tree") for sampling in SAMPLINGS]
# Every drafter and distribution; penalties follow a chain and a path of a tree.
ORDINARY = [("prompt_lookup", "greedy"), ("tree", "sharp"), ("chain", "warm"), ("chain", "sharp")]


@pytest.mark.parametrize(("drafter", "sampling"), cells(MATRIX, ORDINARY))
def test_tiny_models_emit_the_plain_tokens(model, plain, sampling, drafter):
    wanted = plain[sampling]
    chosen = drafters((*wanted[0].prompt_token_ids, *wanted[0].token_ids))[drafter]
    verifier = ("tree_" if chosen.tree else "") + ("greedy" if sampling == "greedy" else "match")
    got = specsparse.generate(model, PROMPTS, sampling=SAMPLINGS[sampling], seed=11, drafter=chosen, verifier=verifier)
    same(got, wanted)
    if drafter != "prompt_lookup":
        counters = got[0].stats.counters
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert counters.num_rounds < wanted[0].stats.counters.num_rounds


@pytest.mark.parametrize("name", cells(SAMPLINGS, ["greedy"]))
def test_the_reference_kernels_emit_the_plain_tokens_too(path, name):
    """Their distributions and draws are compared in test_c1.py."""
    model = specsparse.load(path, backend="reference")
    sampling = SAMPLINGS[name].merged(max_tokens=20, min_tokens=0)
    wanted = specsparse.generate(model, PROMPTS[:2], sampling=sampling, seed=11)
    truth = (*wanted[0].prompt_token_ids, *wanted[0].token_ids)
    same(specsparse.generate(model, PROMPTS[:2], sampling=sampling, seed=11, drafter=drafters(truth)["tree"]), wanted)


def test_the_context_ends_a_text_at_the_same_token(model, plain):
    """The budget shrinks towards the end of the context; the last tokens are the same. Of chains:
    test_model_drafters_identity.py."""
    sampling = SAMPLINGS["greedy"].merged(max_tokens=None)
    wanted = specsparse.generate(model, PROMPTS, sampling=sampling)
    truth = (*wanted[0].prompt_token_ids, *wanted[0].token_ids)
    assert len(truth) == model.config.context_length
    same(specsparse.generate(model, PROMPTS, sampling=sampling, drafter=drafters(truth)["tree"]), wanted)


def test_a_stop_id_inside_an_accepted_path_ends_the_text_there(model, plain):
    wanted = plain["greedy"][0]
    truth = (*wanted.prompt_token_ids, *wanted.token_ids)
    stop = wanted.token_ids[2]
    sampling = SAMPLINGS["greedy"].merged(stop_token_ids=[stop])
    chosen = get_drafter("scripted", gamma=5, accept=(5,), vocab_size=VOCAB, truth=truth)
    plain_stopped = specsparse.generate(model, PROMPTS[0], sampling=sampling)
    got = specsparse.generate(model, PROMPTS[0], sampling=sampling, drafter=chosen)
    same([got], [plain_stopped])
    assert got.token_ids == wanted.token_ids[: wanted.token_ids.index(stop) + 1] and got.finish_reason == "stop"


def test_log_probabilities_are_those_of_plain_decoding(model, plain):
    """Of the emitted tokens, along the accepted path of a tree too; bit for bit."""
    wanted = specsparse.generate(model, PROMPTS, sampling=SAMPLINGS["greedy"], logprobs=3)
    truth = (*wanted[0].prompt_token_ids, *wanted[0].token_ids)
    got = specsparse.generate(model, PROMPTS, sampling=SAMPLINGS["greedy"], logprobs=3, drafter=drafters(truth)["tree"])
    assert [g.logprobs for g in got] == [g.logprobs for g in wanted]


REAL_PROMPTS = [
    "Repeat this list three times: apple, pear, plum, cherry, quince.\napple, pear, plum, cherry, quince.\n",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n\n\ndef fact(n):\n",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
]


@pytest.mark.parametrize("tokens", cells([500, 2000], [500]))
def test_smollm2_writes_the_plain_tokens(smollm2, tokens):
    """One pair; slow, distributions and drafters in pairs that make 2,000 tokens."""
    drafted = total = 0
    suffix, lookup = get_drafter("suffix", gamma=8), get_drafter("prompt_lookup")
    greedy = SamplingParams(temperature=0.0, max_tokens=170, ignore_eos=True)
    sharp = greedy.merged(temperature=0.6, top_k=40, top_p=0.95, repetition_penalty=1.1)
    warm = greedy.merged(temperature=1.0, min_p=0.02)
    plain = functools.cache(lambda sampling: specsparse.generate(smollm2, REAL_PROMPTS, sampling=sampling, seed=5))
    pairs = [(suffix, greedy), (lookup, sharp), (lookup, greedy), (suffix, warm)]
    for drafter, sampling in pairs[:1] if tokens == 500 else pairs:
        wanted = plain(sampling)
        got = specsparse.generate(smollm2, REAL_PROMPTS, sampling=sampling, seed=5, drafter=drafter)
        same(got, wanted, drafted=drafter is lookup)
        drafted += sum(g.stats.counters.num_accepted_tokens for g in got)
        total += sum(len(g.token_ids) for g in wanted)
    assert total >= tokens and drafted > tokens / 10
