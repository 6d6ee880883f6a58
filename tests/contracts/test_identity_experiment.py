"""`experiments/identity.py`: it finds no difference where there is none, finds one where there is, and goes on."""

import json

import numpy as np
import pytest

from experiments import identity
from specsparse.engine import generate
from specsparse.kernels.native import cpu
from specsparse.testing import write_tiny_gguf

METHODS = ["scripted tree", "layer_skip drawn"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    if not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "m.gguf", quant="Q4_0", d_model=32, d_ff=32, n_heads=1, n_kv_heads=1,
        n_layers=2, vocab_size=300, context_length=256,
    )  # fmt: skip


def run(capsys, path, state, *more: str, tokens: int = 1000) -> tuple[int, dict]:
    code = identity.main(["--model", str(path), "--state", str(state), "--tokens", str(tokens), *more])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_no_token_differs_and_a_second_call_goes_on(capsys, path, tmp_path, monkeypatch):
    state = tmp_path / "state.jsonl"
    code, none = run(capsys, path, state, "--methods", *METHODS, "--seconds", "-1")
    assert code == 0 and none["tokens"] == 0 and not none["complete"]
    code, found = run(capsys, path, state, "--methods", *METHODS)
    assert code == 0, found
    assert found["differing"] == 0 and found["tokens"] >= 1000 and found["complete"]
    assert set(found["methods"]) == set(METHODS)
    monkeypatch.setattr(identity.IdentityBench, "compare", None)  # nothing is left to compare
    assert run(capsys, path, state, "--methods", *METHODS) == (0, found)


def test_noise_that_follows_the_rounds_is_found(capsys, path, tmp_path, monkeypatch):
    """The test of the test: the target's noise keyed by the text's length so far, as if drawn in turn."""
    from specsparse.speculative import loop

    def by_round(job, position_Bn):
        return generate.target_uniforms(job, position_Bn[:, :1] + 0 * position_Bn)

    monkeypatch.setattr(loop, "target_uniforms", by_round)
    code, found = run(capsys, path, tmp_path / "state.jsonl", "--methods", "scripted tree", tokens=1500)
    assert code == 1 and found["differing"] > 100


def test_another_runs_state_is_refused(capsys, path, tmp_path):
    state = tmp_path / "state.jsonl"
    state.write_text('{"version": "0"}\n')
    assert identity.main(["--model", str(path), "--state", str(state)]) == 2
    assert "belongs to another run" in capsys.readouterr().err


def test_units_cover_the_tokens_every_method_and_every_distribution():
    names = list(identity.METHODS)
    found = identity.units(100_000, names)
    assert len(found) == len(set(found)) and len(found) * identity.ROWS * identity.TEXT >= 100_000
    assert {(u.method, u.sampling) for u in found} == {(m, sampling) for m in names for sampling in identity.SAMPLINGS}
    temperatures = {p.temperature for sampling in identity.SAMPLINGS.values() for p in sampling}
    assert temperatures == {0.0, 0.6, 1.0}


def test_differing_tokens_are_counted():
    wanted = np.arange(10)
    assert identity.differing_tokens(wanted, wanted) == 0
    assert identity.differing_tokens(np.array([0, 9, 2, 9]), wanted) == 2 + 6


@pytest.mark.slow
def test_smollm2_2000_tokens_of_trees_and_drawn_drafts(smollm2):
    """One batch each of greedy, truncated and penalised sampling, with a draft length of its own in every row."""
    bench, methods = identity.IdentityBench.of(smollm2), ["p_split tree", "layer_skip drawn", "wor tree"]
    found = identity.units(2000, methods)
    assert {u.sampling for u in found} == set(identity.SAMPLINGS)
    for unit in found:
        row = bench.compare(unit, bench.plain(unit.sampling, unit.batch))
        assert row["differing"] == 0 and 0 < row["accepted"] < row["drafted"], (unit, row)
