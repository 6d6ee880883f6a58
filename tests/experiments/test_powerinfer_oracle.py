"""`+experiment=powerinfer_oracle` on results written here: what agrees, what breaks a limit, what is refused."""

import numpy as np
import pytest

import specsparse
from specsparse.errors import UserError
from specsparse.experiments import runner
from specsparse.experiments.kinds.powerinfer_oracle import PowerInferSpec
from specsparse.experiments.settings import FfnSpec
from tests.experiments import playing
from tests.experiments.playing import replaced, run_config
from tests.powerinfer.tiny import write_tiny_powerinfer

IDS = np.array([1, 5, 9, 200, 17, 42], np.int32)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A tiny PowerInfer model and its own logits, as if PowerInfer had written them."""
    folder = tmp_path_factory.mktemp("oracle")
    path = write_tiny_powerinfer(folder / "m.powerinfer.gguf", n_layers=1)
    model = specsparse.load(path, faithful_f16=True)
    written = specsparse.generate(model, IDS, max_tokens=4, ignore_eos=True).token_ids
    greedy = np.concatenate([IDS, np.asarray(written, np.int32)])
    return path, {"tokens": IDS, "m/sparse": model.logits(IDS), "m/greedy_ids": greedy}


@pytest.fixture
def cfg(results, tmp_path):
    return run_config(
        results[0], kind="powerinfer_oracle", ffn=FfnSpec(faithful_f16=True),
        powerinfer=PowerInferSpec(str(tmp_path / "logits.npz"), threads=(1, 2)),
    )  # fmt: skip


def play(cfg, directory):
    found, text, record = playing.play(cfg, directory, width=140)
    return found, text, record["summary"]


def test_equal_logits_are_as_promised(cfg, results, tmp_path):
    np.savez(tmp_path / "logits.npz", **results[1])
    found, text, summary = play(cfg, tmp_path / "a")
    assert found.as_promised and found.objective == 0 and summary["greedy"] == [4, 4]
    for part in ("kept", "4 of 4 equal PowerInfer's", "the same bits with 1, 2 threads"):
        assert part in text


def test_what_differs_breaks_the_promise(cfg, results, tmp_path):
    logits = results[1]["m/sparse"].copy()
    logits[2, 7] += 3e-3
    np.savez(tmp_path / "logits.npz", **{**results[1], "m/sparse": logits})
    found, text, summary = play(cfg, tmp_path / "a")
    assert not found.as_promised and "BROKEN" in text and summary["logits"][0]["max"] == pytest.approx(3e-3, rel=1e-3)
    greedy = results[1]["m/greedy_ids"].copy()
    greedy[-1] += 1
    np.savez(tmp_path / "logits.npz", **{**results[1], "m/greedy_ids": greedy})
    found, text, _ = play(cfg, tmp_path / "b")
    assert not found.as_promised and "3 of 4 equal PowerInfer's" in text
    plain = replaced(cfg, ffn=FfnSpec())
    assert play(plain, tmp_path / "c")[0].as_promised  # without its roundings nothing is promised


def test_mistakes_are_found_before_anything_is_loaded(cfg, results, tmp_path):
    with pytest.raises(UserError, match=r"no such file .*logits.npz; .*powerinfer.logits=FILE"):
        runner.check(cfg)
    np.savez(tmp_path / "logits.npz", **{"tokens": IDS, "other/sparse": results[1]["m/sparse"]})
    with pytest.raises(UserError, match="hold no logits of 'm'; they are of other"):
        runner.check(cfg)
    (tmp_path / "logits.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(UserError, match=r"cannot be read as \.npz"):
        runner.check(cfg)
    np.savez(tmp_path / "logits.npz", **results[1])
    with pytest.raises(UserError, match=r"powerinfer\.threads"):
        runner.check(replaced(cfg, powerinfer={"threads": [0]}))
