"""Generated prompts, and the text that a model makes of them."""

import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.data import prompts
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.support.options import read
from specsparse.testing import write_tiny_gguf
from specsparse.training import data
from specsparse.training.prompts import grammar, prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return specsparse.load(
        write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", quant="Q8_0", context_length=512)
    )


OPTIONS = data.DataOptions(batch=3, answer=8, prompt_tokens=400, temperatures=(0.0, 0.8), chat=False, seed=5)


def test_prompts_are_of_all_tasks_and_none_is_built_in():
    found = [prompt(i, seed=1) for i in range(600)]
    builtin = prompts.load()
    assert {p.task for p in found} == {p.task for p in builtin} == set(grammar()["tasks"])
    assert len({p.text for p in found}) > 500
    assert not {p.text for p in found} & {p.text for p in builtin}
    assert not [p for p in found if "{" in p.text and "}" not in p.text]
    assert found[7] == prompt(7, seed=1) != prompt(7, seed=2)


def test_what_comes_once_is_the_same_throughout():
    rules = {
        "tasks": {"a": 1},
        "a": ["{x} {x} {y} {y} {y} {3..4}"],
        "x": list("pqrst"),
        "y": list("uvwxyz"),
        "once": ["x"],
    }
    found = [prompt(i, rules=rules).text.split() for i in range(50)]
    assert all(a == b for a, b, *_ in found) and {t[-1] for t in found} == {"3", "4"}
    assert any(c != d for _, _, c, d, *_ in found)
    with pytest.raises(ValueError, match="does not end"):
        prompt(0, rules={"tasks": {"a": 1}, "a": ["{a}"]})


def test_an_answer_is_plain_decodings_with_the_rows_of_a_forward_pass(model):
    ids = [np.array([5, 9, 7, 30]), np.array([8]), np.array([11, 12, 13, 14, 15, 16])]
    laws = [SamplingParams(temperature=0.0, max_tokens=7), SamplingParams(temperature=0.9, max_tokens=12)]
    params = [laws[0], laws[1], laws[1]]
    texts = data.answer(model, ids, params, seed=3)
    capacity = model.capacity_for(32)
    for i, text in enumerate(texts):
        plain = specsparse.generate(model, ids[0], sampling=laws[0]).token_ids if i == 0 else None
        whole = list(text.tokens)
        assert text.prompt == len(ids[i]) and whole[: text.prompt] == ids[i].tolist()
        if plain is not None:
            assert whole[text.prompt :] == list(plain)[:-1]
        out, _ = model.forward(
            model.params_for(capacity), text.tokens[None], model.new_cache(1, capacity), want=Want("none", hidden=True)
        )
        np.testing.assert_array_equal(text.hidden, np.asarray(out.hidden[0]).astype(np.float16))


def test_shards_are_made_once_and_made_alike(model, tmp_path):
    paths = data.generate(model, OPTIONS, tmp_path / "a", tokens=30)
    first = [t for p in paths for t in data.read_shard(p)]
    assert sum(len(t.tokens) - t.prompt for t in first) >= 30 and len(paths) >= 2
    stamp = paths[0].stat().st_mtime_ns
    paths[1].unlink()
    again = data.generate(model, OPTIONS, tmp_path / "a", tokens=30)
    assert again == paths and paths[0].stat().st_mtime_ns == stamp
    for a, b in zip(first, (t for p in again for t in data.read_shard(p)), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.hidden, b.hidden)
    assert len({tuple(t.tokens[: t.prompt]) for t in first}) == len(first)


def test_mistakes_are_one_line(model, tmp_path):
    with pytest.raises(UserError, match=r"train\.batch=0"):
        read(data.DataOptions, {"batch": 0}, group="train")
    with pytest.raises(UserError, match=r"train\.temperatures"):
        read(data.DataOptions, {"temperatures": []}, group="train")
    with pytest.raises(UserError, match=r"raise train\.prompt_tokens"):
        data.make_shard(model, data.DataOptions(batch=1, prompt_tokens=1, chat=False), 0)
    data.write_tensors(tmp_path / "x.safetensors", {"a": np.zeros(1)}, {})
    with pytest.raises(UserError, match="holds no texts"):
        data.read_shard(tmp_path / "x.safetensors")
