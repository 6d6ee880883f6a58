"""Drafts by fewer neurons of the same weights: what they keep, and what is refused."""

import dataclasses

import numpy as np
import pytest

import specsparse
from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import dequantize
from specsparse.powerinfer import fewer
from specsparse.powerinfer.fewer import with_fewer_neurons
from specsparse.predictors.collect import collect, self_generated
from specsparse.speculative.drafters import get_drafter
from specsparse.testing import write_tiny_gguf
from tests.powerinfer.tiny import write_tiny_powerinfer

IDS = [1, 5, 9, 200, 17, 42, 42, 8]
TINY = {"tokenizer": "spm", "vocab_size": 300, "n_layers": 1, "d_ff": 128}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return specsparse.load(write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", quant="Q4_0", **TINY))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return specsparse.load(write_tiny_powerinfer(tmp_path_factory.mktemp("m") / "m.powerinfer.gguf", **TINY))


def test_a_hot_one_is_a_smaller_dense_model(dense):
    small = with_fewer_neurons(dense, rule="hot", share=0.5, text=IDS)
    own, whole = small.params.layers[0], dense.params.layers[0]
    assert small.config.d_ff == 64 and own.ffn_gate.shape == (64, dense.config.d_model) and own.attn_q is whole.attn_q
    gate, rows = np.asarray(dequantize(whole.ffn_gate)), np.asarray(dequantize(own.ffn_gate))
    ids = [int(np.flatnonzero((gate == row).all(axis=1))[0]) for row in rows]
    assert ids == sorted(ids)  # rows of the whole model, none twice
    down = np.asarray(dequantize(whole.ffn_down))[:, ids]
    assert np.abs(np.asarray(dequantize(own.ffn_down)) - down).max() <= np.abs(down).max() / 127
    as_many = with_fewer_neurons(dense, share=1.0, text=IDS)
    gaps = [np.abs(one.logits(IDS) - dense.logits(IDS)).max() for one in (as_many, small)]
    assert gaps[0] < 0.05 < gaps[1]  # of the whole one only down was packed once more


def test_one_with_the_targets_own_threshold_is_accepted_whole(sparse):
    """Nothing is lost and nothing refused: draft and target are one model."""
    plain = specsparse.generate(sparse, IDS, max_tokens=16, ignore_eos=True)
    for threshold in (0.0, 0.5):
        drafter = get_drafter("sparse_self", gamma=3, rule="own", threshold=threshold)
        got = specsparse.generate(sparse, IDS, max_tokens=16, ignore_eos=True, drafter=drafter)
        assert got.token_ids == plain.token_ids
        c = got.stats.counters
        refused = c.num_tested - c.num_accepted_tokens
        assert refused == 0 if threshold == 0 else refused > 0


def test_a_text_is_cut_to_the_context(dense, monkeypatch):
    short = dataclasses.replace(dense, config=dataclasses.replace(dense.config, context_length=5))
    read = []
    monkeypatch.setattr(fewer, "collect", lambda model, text: read.append(text.tolist()) or collect(model, text))
    for model in (short, dense):
        with_fewer_neurons(model, text=IDS)
    assert read == [[IDS[:5]], [IDS]]


def test_text_that_the_model_writes(dense):
    text = self_generated(dense, tokens=12, texts=3, seed=5)
    assert text.shape == (3, 12) and (text[:, 0] == dense.tokenizer.bos_id).all()
    again = self_generated(dense, tokens=12, texts=3, seed=5)
    assert len({tuple(t) for t in text}) == 3 and np.array_equal(text, again)


MISTAKES = {
    "own without predictors": (
        {"rule": "own", "threshold": 0.5},
        "dense",
        "no predictors with a threshold: give rule=hot",
    ),
    "no text": ({"text": []}, "dense", r"drafter\.text must hold ids in 0\.\.299"),
    "another vocabulary": ({"text": [1, 300]}, "dense", r"drafter\.text must hold ids in 0\.\.299"),
    "a negative id": ({"rule": "gate", "text": [-1]}, "dense", r"drafter\.text must hold ids"),
    "hot on a sparse target": ({"rule": "hot"}, "sparse", "ffn=powerinfer: give rule=own"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_rule_that_the_target_cannot_follow(dense, sparse, what):
    options, which, says = MISTAKES[what]
    with pytest.raises(UserError, match=says):
        with_fewer_neurons({"dense": dense, "sparse": sparse}[which], **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": "own"}, r"drafter\.threshold goes with rule=own"),
        ({"threshold": 0.5}, r"drafter\.threshold goes with rule=own"),
        ({"rule": "own", "threshold": 0.5, "share": 0.5}, r"^drafter\.share goes with"),
        ({"rule": "cold"}, "must be one of hot, gate, own"),
        ({"share": 1.5}, r"drafter\.share=1\.5"),
        ({"text": []}, r"^drafter\.text holds no ids"),
        ({"text": 5}, r"drafter\.text=5 must be a list of ids or a file of ids"),
        ({"text": "no/such/file"}, r"drafter\.text=no/such/file must be a list of ids or a file"),
        ({"rule": "own", "threshold": 0.5, "text": [1]}, r"^drafter\.text goes with"),
        ({"draft_vocab": "no/such/file"}, r"drafter\.draft_vocab=no/such/file must be a number, a list"),
    ],
)
def test_options_that_do_not_go_together(options, says):
    with pytest.raises(UserError, match=says):
        get_drafter("sparse_self", **options)
