"""Drafters with a model, chains and trees: `match` and `tree_match` give the tokens of plain decoding, one for one."""

from collections import Counter

import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.kernels.native import cpu
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.trees import get_tree
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import random_dflash, random_eagle3, random_head
from tests.cells import cells

PROMPTS = ["hello world hello", "abcabcabcabc", "the"]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    "sharp": SamplingParams(
        temperature=0.6, top_k=8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=60,
        ignore_eos=True,
    ),
    "warm": SamplingParams(temperature=1.0, top_p=0.6, min_p=0.02, bad_words=["the"], min_tokens=20, max_tokens=60),
}  # fmt: skip
METHODS = {
    "model_drawn": ("greedy", "model", {"temperature": 0.3}),
    "layer_skip": ("greedy", "layer_skip", {"layers": [0]}),
    "sparse_self": ("greedy", "sparse_self", {"share": 0.34}),
    "sparse_self_gate": ("sharp", "sparse_self", {"rule": "gate", "share": 0.4, "temperature": 0.4}),
    "dynamic": ("greedy", "model", {"tree": get_tree("dynamic", total=9, depth=4, top_k=3)}),
    "static": ("greedy", "layer_skip", {"tree": get_tree("static", widths=(3, 2))}),
    "sparse_self_static": (
        "greedy", "sparse_self", {"rule": "gate", "share": 0.4, "tree": get_tree("static", widths=(3, 2))},
    ),
    "layer_skip_drawn": ("sharp", "layer_skip", {"layers": [0, 1], "temperature": 0.4, "draft_vocab": 200}),
    "wor": ("sharp", "layer_skip", {"temperature": 0.4, "tree": get_tree("sampled_wor", widths=(3, 1))}),
    "iid": ("warm", "model", {"temperature": 0.4, "tree": get_tree("sampled_iid", widths=(3, 1))}),
    "p_split": ("warm", "layer_skip", {"layers": [0, 1], "tree": get_tree("p_split", nodes=8, p_split=0.02)}),
    "p_min": ("warm", "model", {"p_min": 0.2}),
    "head": ("greedy", "head", {}),
    "lookup_head": ("sharp", "lookup_head", {"ngram_min": 3, "p_min": 0.0}),
    "lookup_head_drawn": ("sharp", "lookup_head", {"ngram_min": 3, "p_min": 0.0, "temperature": 0.4}),
    "mixed": ("warm", "mixed", {}),
    "head_drawn": ("greedy", "head", {"temperature": 0.4}),
    "eagle3": ("greedy", "eagle3", {}),
    "eagle3_drawn": ("sharp", "eagle3", {"temperature": 0.4}),
    "eagle3_p_split": ("warm", "eagle3", {"tree": get_tree("p_split", nodes=8, p_split=0.02)}),
    "dflash": ("greedy", "dflash", {}),
    "dflash_drawn": ("sharp", "dflash", {"temperature": 0.6}),
    "dflash_tree": ("warm", "dflash", {"tree": get_tree("ddtree", nodes=9, depth=4)}),
    "head_tree": ("warm", "head", {"tree": get_tree("dynamic", total=9, depth=4, top_k=3)}),
}

# Every way to draft stays: argmax and drawn drafts as chain and as tree, of a model with a cache of its own, of the
# target's layers and of heads on its features (a head is in `mixed`, a block's text in test_dflash.py). The slow ones
# pair them another way.
ORDINARY = (
    "layer_skip_drawn", "sparse_self_static", "wor", "iid", "p_min", "lookup_head_drawn", "mixed", "eagle3_p_split",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its context ends inside the longest text."""
    if not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "m.gguf", quant="Q4_0", d_model=64, d_ff=96, n_layers=2, vocab_size=300,
        context_length=64,
    )  # fmt: skip
    return specsparse.load(path)


@pytest.fixture(scope="module")
def head(model, tmp_path_factory):
    return random_head(tmp_path_factory.mktemp("head"), model)


@pytest.fixture(scope="module")
def plain(model):
    return {
        name: specsparse.generate(model, PROMPTS, sampling=sampling, seed=14) for name, sampling in SAMPLINGS.items()
    }


@pytest.fixture(scope="module")
def block_drafter(model, plain):
    """It drafts a few ids only, those that the texts are mostly made of: a random one is then right now and then."""
    written = Counter(i for texts in plain.values() for g in texts for i in g.token_ids)
    return random_dflash(model, ids=sorted(i for i, _ in written.most_common(6)), layers=1)


@pytest.mark.parametrize("method", cells(METHODS, ORDINARY))
def test_tiny_models_emit_the_plain_tokens(model, head, block_drafter, plain, method):
    sampling, name, options = METHODS[method]
    own = {"model": {"model": model}}.get(name, {})
    if name in ("head", "lookup_head", "mixed"):
        own = {"head": head}
    if name == "eagle3":  # a random head finds a token by chance: the fewer it scores, the sooner
        common = Counter(token for g in plain[sampling] for token in g.token_ids).most_common(12)
        own = {"path": random_eagle3(model, ids=[token for token, _ in common])}
    if name == "dflash":
        own = {"path": block_drafter}
    drafter = get_drafter(name, gamma=4, **own, **options)
    verifier = "tree_match" if drafter.tree else "match"
    got = specsparse.generate(model, PROMPTS, sampling=SAMPLINGS[sampling], seed=14, drafter=drafter, verifier=verifier)
    assert [g.token_ids for g in got] == [g.token_ids for g in plain[sampling]]
    assert [g.finish_reason for g in got] == [g.finish_reason for g in plain[sampling]]
    counters = [g.stats.counters for g in got]
    assert 0 < sum(c.num_accepted_tokens for c in counters) < sum(c.num_draft_tokens for c in counters)


@pytest.mark.slow  # tiny models skip layers above, and the real one writes plain text in test_speculation_identity.py
def test_smollm2_skips_layers(smollm2):
    prompt = "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who"
    wanted = specsparse.generate(smollm2, prompt, max_tokens=64, ignore_eos=True)
    skips = get_drafter("layer_skip", gamma=4)  # a length by itself would hang on what this machine is thought to take
    got = specsparse.generate(smollm2, prompt, max_tokens=64, ignore_eos=True, drafter=skips)
    assert got.token_ids == wanted.token_ids and got.stats.counters.num_accepted_tokens > 0
