"""Generated prompts, and the text that a model makes of them."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.data import prompts
from specsparse.engine.generate import Finish
from specsparse.engine.llama import Want
from specsparse.errors import UserError
from specsparse.runtime.method import Method
from specsparse.runtime.session import Request, Session
from specsparse.support.options import read
from specsparse.testing import write_tiny_gguf
from specsparse.training import corpus
from specsparse.training.corpus import Features, grammar, prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return specsparse.load(
        write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", quant="Q8_0", context_length=512)
    )


OPTIONS = corpus.DataOptions(
    batch=2, batches=2, answer=8, prompt_tokens=400, temperatures=(0.0, 0.8), chat=False, seed=5
)


def test_prompts_are_of_all_tasks_and_none_is_built_in():
    found = [prompt(i, seed=1) for i in range(600)]
    builtin = prompts.load()
    assert {task for task, _ in found} == {p.task for p in builtin} == set(grammar()["tasks"])
    texts = {text for _, text in found}
    assert len(texts) > 500 and not texts & {p.text for p in builtin}
    assert not [text for text in texts if "{" in text and "}" not in text]
    assert found[7] == prompt(7, seed=1) != prompt(7, seed=2)


def test_what_comes_once_is_the_same_throughout():
    rules = {
        "tasks": {"a": 1},
        "a": ["{x} {x} {y} {y} {y} {3..4}"],
        "x": list("pqrst"),
        "y": list("uvwxyz"),
        "once": ["x"],
    }
    found = [prompt(i, rules=rules)[1].split() for i in range(50)]
    assert all(a == b for a, b, *_ in found) and {t[-1] for t in found} == {"3", "4"}
    assert any(c != d for _, _, c, d, *_ in found)
    with pytest.raises(AssertionError, match="does not end"):
        prompt(0, rules={"tasks": {"a": 1}, "a": ["{a}"]})


def test_an_answer_is_plain_decodings_with_the_rows_of_a_forward_pass(model):
    ids = [np.array([5, 9, 7, 30]), np.array([8]), np.array([11, 12, 13, 14, 15, 16])]
    sampling = [SamplingParams(temperature=0.0, max_tokens=7), SamplingParams(temperature=0.9, max_tokens=12)]
    params = [sampling[0], sampling[1], sampling[1]]
    texts = corpus.answer(model, [Request(p, s, 3, i) for i, (p, s) in enumerate(zip(ids, params, strict=True))])
    plain = specsparse.generate(model, ids[0], sampling=sampling[0]).token_ids
    assert texts[0].tokens[4:].tolist() == list(plain)
    read = Features(model, (0, 1, model.config.n_layers)).of(texts)
    capacity, width = model.capacity_for(32), model.config.d_model
    forward = jax.jit(partial(model.forward, want=Want("none", hidden=(0, 1, model.config.n_layers))))
    for i, text in enumerate(texts):
        assert text.prompt == len(ids[i]) and text.tokens[: text.prompt].tolist() == ids[i].tolist()
        row = np.pad(text.tokens, (0, 32 - len(text.tokens)))[None]  # one program for all lengths
        out, _ = forward(model.params_for(capacity), row, model.new_cache(1, capacity))
        np.testing.assert_array_equal(read[i].hidden, np.asarray(out.hidden[0])[: len(text.tokens)])
        assert read[i].hidden.shape == (len(text.tokens), 3 * width)
        np.testing.assert_array_equal(read[i].tokens, text.tokens)


def test_shards_are_made_once_and_made_alike(model, tmp_path):
    seen: list[corpus.TextWritten] = []
    paths = corpus.generate(model, OPTIONS, tmp_path / "a", tokens=40, progress=seen.append)
    first = [t for p in paths for t in corpus.read_shard(p)]
    assert sum(len(t.tokens) - t.prompt for t in first) == seen[-1].tokens >= 40 and len(paths) == len(seen) >= 2
    assert seen[-1].tokens_per_s > 0 and paths[0].stat().st_size < 8 * sum(len(t.tokens) for t in first) + 1000
    stamp = paths[0].stat().st_mtime_ns
    paths[1].unlink()
    again = corpus.generate(model, OPTIONS, tmp_path / "a", tokens=40)
    assert again == paths and paths[0].stat().st_mtime_ns == stamp
    for a, b in zip(first, (t for p in again for t in corpus.read_shard(p)), strict=True):
        assert a.tokens.dtype == b.tokens.dtype == np.int32 and a.prompt == b.prompt
        np.testing.assert_array_equal(a.tokens, b.tokens)
    assert len({tuple(t.tokens[: t.prompt]) for t in first}) == len(first)


OWN = corpus.DataOptions(
    text="self", batch=8, batches=1, answer=12, prompt_tokens=300, temperatures=(0.0, 0.8), seed=5
)


def test_magpie_text_is_the_same_by_any_batch_and_resumed(model, tmp_path):
    """The files of two batch sizes hold the same texts, and a file that is made again holds them again."""
    made = [corpus.make_shard(model, OWN, index) for index in (0, 1)]
    corpus.write_shard(tmp_path / "texts_00000.safetensors", made[0])
    first = sum(len(t.tokens) - t.prompt for t in made[0])
    paths = corpus.generate(model, OWN, tmp_path, tokens=first + 1)  # goes on from the first file
    found = [text for path in paths for text in corpus.read_shard(path)]
    other = corpus.make_shard(model, replace(OWN, batch=4, batches=4), 0)
    assert len(paths) == 2 and made[0] and made[1]
    for a, b, c in zip(made[0] + made[1], found, other, strict=True):
        assert a.prompt == b.prompt == c.prompt
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.tokens, c.tokens)


def test_magpie_texts_are_turns_that_end_and_plain_answers_to_them(model):
    """As decoded one by one: a text that takes another's place changes nothing."""
    tokenizer, share = model.tokenizer, OWN.repeated
    begin = np.array(tokenizer.encode("<|im_start|>user\n", parse_special=True))
    params = SamplingParams(temperature=1.0, max_tokens=300 - len(begin))
    wanted, seen = [], Counter()
    for n in range(16):
        session = Session(model, [Request(begin, params, 5, 2 * n)], Method())
        session.advance()
        (ids,), (finish,) = session.tokens(), session.finish
        special = not tokenizer.special_ids.isdisjoint(ids[:-1].tolist())
        seen.update({"open": finish is not Finish.STOP, "special": special})
        if finish is Finish.STOP and not special and len(ids) > 8 and corpus.unrepeated(ids, share=share) == len(ids):
            turn = corpus.encode(model, tokenizer.decode(ids[:-1]).strip(), chat=True)
            how = SamplingParams(temperature=OWN.temperatures[n % 2], max_tokens=OWN.answer)
            (text,) = corpus.answer(model, [Request(turn, how, 5, 2 * n + 1)])
            good = corpus.unrepeated(text.tokens[text.prompt :], share=share)
            wanted += [text.tokens[: text.prompt + good].tolist()] if len(turn) <= 300 and good >= 8 else []
    made = corpus.make_shard(model, replace(OWN, batch=4, batches=4), 0)
    assert seen["open"] and seen["special"] and wanted
    assert [text.tokens.tolist() for text in made] == wanted


def test_magpie_texts_end_where_they_begin_to_repeat_themselves():
    unrepeated = corpus.unrepeated
    assert unrepeated(np.arange(8), share=0.0) == 8 and unrepeated(np.zeros(7), share=0.0) == 7
    loop = np.concatenate([np.arange(20), np.tile(np.arange(4), 6), np.arange(50, 90)])
    old = [1 - len({tuple(loop[i : i + 4]) for i in range(n - 3)}) / (n - 3) for n in range(4, len(loop) + 1)]
    for share in (0.0, 0.2, 0.3):
        assert unrepeated(loop, share=share) == next(n for n, s in enumerate(old, 4) if s > share) - 1
    assert unrepeated(loop, share=0.2) < unrepeated(loop, share=0.3) < len(loop) == unrepeated(loop, share=0.6)


def test_magpie_needs_a_chat_template(model, tmp_path):
    with pytest.raises(UserError, match=r"train\.text=self: .*data\.chat=true"):
        corpus.DataOptions(text="self", chat=False)
    with pytest.raises(UserError, match=r"train\.repeated"):
        corpus.make_shard(model, replace(OWN, prompt_tokens=9), 0)
    path = write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, chat_template="{{ messages[0]['content'] | upper }}")
    with pytest.raises(UserError, match=r"train\.text=self needs a chat template"):
        corpus.make_shard(specsparse.load(path), OWN, 0)


def test_documents_are_pieces_of_answers_length(model, tmp_path):
    """Running text is an answer from its second token on; an answer stands behind its question."""
    (tmp_path / "a.txt").write_text("one two three four five six " * 2, encoding="utf-8")
    rows = [
        {"prompt": "what is it", "answer": "a long answer, and more of it"},
        {"text": "only a little"},
        {"text": " "},
    ]
    rows += [{"prompt": "p" * 500, "answer": "after a prompt that is too long"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    read = [*corpus.read_documents(tmp_path / "a.txt"), *corpus.read_documents(tmp_path / "b.jsonl")]
    assert [d.prompt and d.prompt[:9] for d in read] == [None, "what is i", None, "ppppppppp"]
    options = corpus.DataOptions(answer=10, prompt_tokens=40, chat=False)
    found, encode = corpus.tokenised(model, read, options), model.tokenizer.encode
    running, question = encode("one two three four five six " * 2), encode("what is it", add_special=True)
    assert not model.tokenizer.add_bos and len(running) > 30
    pieces = [running[i : i + 10] for i in range(0, len(running), 10) if len(running) - i >= 8]
    answered = [*question, *encode("a long answer, and more of it")[:10]]
    assert [t.tokens.tolist() for t in found] == [*pieces, answered, encode("only a little")[:10]]
    assert [t.prompt for t in found] == [1] * len(pieces) + [len(question), 1]
    assert all(t.tokens.dtype == np.int32 for t in found)


def test_a_document_of_a_model_with_bos_begins_with_it(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", tokenizer="spm", n_layers=1)
    bos = specsparse.load(path)
    (text,) = corpus.tokenised(bos, [corpus.Document("abc abc abc")], corpus.DataOptions())
    assert text.tokens.tolist() == bos.tokenizer.encode("abc abc abc", add_special=True) and text.prompt == 1
    assert text.tokens[0] == bos.tokenizer.bos_id


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", None, "cannot be read"),
        ("x.txt", b"\xff\xfe\xff", "cannot be read"),
        ("x.txt", b" \n", "holds no text"),
        ("x.jsonl", b'{"text": "a"}\n{"text"', "x.jsonl:2: cannot be read"),
        ("x.jsonl", b'{"prompt": "a"}', 'x.jsonl:1: .*needs "text"'),
        ("x.jsonl", b'["a"]', 'x.jsonl:1: .*needs "text"'),
    ],
)
def test_documents_that_cannot_be_read_are_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"train.documents: .*{message}"):
        corpus.read_documents(tmp_path / name)


def test_mistakes_are_one_line(model, tmp_path):
    with pytest.raises(UserError, match=r"train\.batch=0"):
        read(corpus.DataOptions, {"batch": 0}, group="train")
    with pytest.raises(UserError, match=r"train\.temperatures"):
        read(corpus.DataOptions, {"temperatures": []}, group="train")
    with pytest.raises(UserError, match=r"raise train\.prompt_tokens"):
        corpus.make_shard(model, corpus.DataOptions(batch=1, prompt_tokens=1, chat=False), 0)
    corpus.write_tensors(tmp_path / "x.safetensors", {"a": np.zeros(1)}, {})
    with pytest.raises(UserError, match="holds no texts"):
        corpus.read_shard(tmp_path / "x.safetensors")
    corpus.write_shard(tmp_path / "y.safetensors", [corpus.Text(np.arange(9, dtype=np.int32), 4)])
    tensors, meta = corpus.read_tensors(tmp_path / "y.safetensors")
    corpus.write_tensors(tmp_path / "y.safetensors", {**tensors, "lengths": np.array([8])}, meta)
    with pytest.raises(UserError, match="or damaged ones"):
        corpus.read_shard(tmp_path / "y.safetensors")
