"""The public API: `load`, `generate`, `stream`.

Promised: every way to ask for a text gives the same text (one prompt or a list, at once or streamed, n at a time or
one); a text ends where it was told to, with the reason; log probabilities are the model's own; a mistake is one line.
"""

import jax
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.testing import write_tiny_gguf

CONTEXT = 96
WARM = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
PROMPTS = ["hello world", "a", "caf\u00e9 and the other one"]
SIZE = {"d_model": 64, "d_ff": 96, "n_layers": 1, "vocab_size": 300, "context_length": CONTEXT}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", quant="F16", **SIZE)


@pytest.fixture(scope="module")
def model(path):
    return specsparse.load(path)


@pytest.fixture(scope="module")
def warm(model):
    """One sampled text."""
    return specsparse.generate(model, PROMPTS[0], sampling=WARM, seed=1)


def refused(match: str, call, *args, **options) -> None:
    """The call ends in one line that says `match`."""
    with pytest.raises(UserError, match=match) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)


# One text, however it is asked for.


def test_a_list_gives_what_each_prompt_gives(model, warm):
    together = specsparse.generate(model, PROMPTS, sampling=WARM, seed=1)
    assert isinstance(together, list) and together[0].token_ids == warm.token_ids and together[0].text == warm.text
    for prompt, got in zip(PROMPTS, together, strict=True):
        alone = specsparse.generate(model, [prompt], sampling=WARM, seed=got.seed)
        assert len(alone) == 1 and alone[0].token_ids == got.token_ids


def test_ids_text_array_and_chat_are_prompts(model, warm):
    ids = model.tokenizer.encode(PROMPTS[0], add_special=True)
    assert warm.prompt_token_ids == tuple(ids)
    for prompt in (ids, tuple(ids), np.array(ids)):
        assert specsparse.generate(model, prompt, sampling=WARM, seed=1).token_ids == warm.token_ids
    chat = [{"role": "user", "content": "hi"}]
    rendered = specsparse.generate(model, model.tokenizer.apply_chat_template(chat), sampling=WARM, seed=1)
    assert specsparse.generate(model, chat, sampling=WARM, seed=1).token_ids == rendered.token_ids
    assert 1 in rendered.prompt_token_ids  # <|im_start|> is read as a token


@pytest.mark.parametrize("seed", range(8))
def test_stream_pieces_make_the_text(model, seed):
    """Random bytes, so that characters are often incomplete; never half of one is shown."""
    bytes_of_text = [3 + b for b in "\u00e9\u4f60\U0001f600".encode()]
    options = {"sampling": WARM, "seed": seed, "allowed_token_ids": None if seed % 2 else bytes_of_text}
    got = specsparse.generate(model, "x", **options)
    stream = specsparse.stream(model, "x", **options)
    pieces = list(stream)
    assert "".join(pieces) == got.text == stream.generation.text and all(pieces)
    assert stream.generation.token_ids == got.token_ids and stream.generation.finish_reason == got.finish_reason
    assert got.text == model.tokenizer.decode(got.token_ids)


def test_characters_of_several_tokens_come_whole(model):
    """\u00e9 is two tokens; they are forced in turn, and no piece holds a broken character."""

    def force(ids, logits):
        import jax.numpy as jnp

        wanted = jnp.where(ids[-1] == 3 + 0xC3, 3 + 0xA9, 3 + 0xC3)
        return logits.at[wanted].add(jnp.float32(1e6))

    pieces = list(specsparse.stream(model, "x", sampling=WARM, max_tokens=31, logits_processors=[force]))
    assert "".join(pieces) == "\u00e9" * 15 + "\ufffd"
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_n_and_seeds(model, warm):
    four = specsparse.generate(model, PROMPTS[0], sampling=WARM, seed=1, n=4)
    assert four[0].token_ids == warm.token_ids and len({g.token_ids for g in four}) == 4
    pairs = specsparse.generate(model, PROMPTS[:2], sampling=WARM, seed=1, n=2)
    assert [g.token_ids for g in pairs[:2]] == [g.token_ids for g in four[:2]] and len(pairs) == 4
    assert pairs[2].prompt_token_ids == tuple(model.tokenizer.encode(PROMPTS[1]))
    other = specsparse.generate(model, PROMPTS[0], sampling=WARM, seed=2)
    assert other.token_ids != warm.token_ids
    assert specsparse.generate(model, PROMPTS[0], sampling=WARM, seed=1).token_ids == warm.token_ids
    assert specsparse.generate(model, PROMPTS[0], sampling=WARM.merged(seed=1), seed=9).token_ids == warm.token_ids
    last = [specsparse.generate(model, PROMPTS[0], sampling=WARM, seed=seed).token_ids for seed in (2**64 - 2, -2)]
    assert last[0] == last[1] != warm.token_ids


def test_best_of_keeps_the_likeliest(model):
    every = specsparse.generate(model, "a", sampling=WARM, seed=0, n=4, logprobs=0, max_tokens=8)
    order = sorted(every, key=lambda g: -sum(t.logprob for t in g.logprobs))
    best = specsparse.generate(model, "a", sampling=WARM, seed=0, n=2, best_of=4, max_tokens=8)
    assert [g.token_ids for g in best] == [g.token_ids for g in order[:2]] and best[0].logprobs is None
    one = specsparse.generate(model, "a", sampling=WARM, seed=0, best_of=4, max_tokens=8, logprobs=1)
    assert one.token_ids == order[0].token_ids and len(one.logprobs) == 8


# Where a text ends.


def test_max_tokens_and_the_context_end_a_text(model):
    for tokens in (1, 5):
        got = specsparse.generate(model, "a", max_tokens=tokens, ignore_eos=True)
        assert len(got.token_ids) == tokens and got.finish_reason == "length"
    whole = specsparse.generate(model, "a", ignore_eos=True)
    assert len(whole.token_ids) == CONTEXT - 1 and whole.finish_reason == "length"
    full = specsparse.generate(model, [5] * CONTEXT)
    assert full.token_ids == () and full.text == "" and full.finish_reason == "length"
    assert list(specsparse.stream(model, [5] * CONTEXT)) == []
    longer = [*range(3, 100), *range(3, 50)]
    cut = specsparse.generate(model, longer, truncate_prompt_tokens=4, max_tokens=3)
    assert cut.prompt_token_ids == tuple(longer[-4:])


@pytest.mark.parametrize("tokens", [None, 1, 12, CONTEXT - 1])
def test_a_prompt_cut_to_the_context_leaves_room_for_max_tokens(model, tokens):
    longer, room = [*range(3, 100), *range(3, 50)], 1 if tokens is None else tokens
    got = specsparse.generate(model, longer, truncate_prompt_tokens=-1, max_tokens=tokens, ignore_eos=True)
    assert got.prompt_token_ids == tuple(longer[room - CONTEXT :]) and len(got.token_ids) == room
    short = specsparse.generate(model, [5, 6, 7], truncate_prompt_tokens=-1, max_tokens=4, ignore_eos=True)
    assert short.prompt_token_ids == (5, 6, 7)


def test_max_tokens_that_leave_no_prompt_are_refused(model):
    wrong = {"truncate_prompt_tokens": -1, "max_tokens": CONTEXT}
    refused("max_tokens=96 leaves truncate_prompt_tokens=-1 no prompt", specsparse.generate, model, "a", **wrong)


def test_stop_ids_and_eos(model, warm):
    stop = warm.token_ids[5]
    first = warm.token_ids.index(stop)
    got = specsparse.generate(model, PROMPTS[0], sampling=WARM, seed=1, stop_token_ids=[stop])
    assert got.token_ids == warm.token_ids[: first + 1] and got.finish_reason == "stop"
    assert got.text == model.tokenizer.decode(warm.token_ids[:first])
    kept = specsparse.generate(
        model, PROMPTS[0], sampling=WARM, seed=1, stop_token_ids=[stop], include_stop_str_in_output=True
    )
    assert kept.text == model.tokenizer.decode(warm.token_ids[: first + 1])
    eos = {"logit_bias": {model.tokenizer.eos_id: 1e6}, "max_tokens": 6}
    ended = specsparse.generate(model, "a", **eos)
    assert ended.token_ids == (model.tokenizer.eos_id,) and ended.text == "" and ended.finish_reason == "stop"
    assert len(specsparse.generate(model, "a", ignore_eos=True, **eos).token_ids) == 6
    late = specsparse.generate(model, "a", min_tokens=4, **eos)
    assert len(late.token_ids) == 5 and late.token_ids[4] == model.tokenizer.eos_id
    assert not model.tokenizer.stop_ids & set(late.token_ids[:4])


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(model, include):
    """Cut at the first of them, over token borders, streamed or not; the ids end with the token that completes it."""
    sampling = WARM.merged(allowed_token_ids=[3 + b for b in b"abcd"], max_tokens=80)
    free = specsparse.generate(model, "x", sampling=sampling, seed=4)
    for stops in (["bad"], ["dd", "ca"], ["zz"], ["dac", "ac"], [free.text[7:40]]):
        ends = [(free.text.find(s), -len(s), s) for s in stops if s in free.text]
        options = {"sampling": sampling, "seed": 4, "stop": stops, "include_stop_str_in_output": include}
        got, stream = specsparse.generate(model, "x", **options), specsparse.stream(model, "x", **options)
        assert "".join(stream) == got.text
        assert stream.generation.token_ids == got.token_ids
        if not ends:
            assert got.text == free.text and got.finish_reason == "length"
            continue
        at, _, stop = min(ends)
        assert got.text == free.text[: at + len(stop) * include] and got.finish_reason == "stop"
        assert got.token_ids == free.token_ids[: at + len(stop)]  # a token is a character here
    several = specsparse.generate(model, ["x", "y"], sampling=sampling, seed=4, stop=["bad"])
    assert several[0].text == specsparse.generate(model, "x", sampling=sampling, seed=4, stop=["bad"]).text


def test_the_same_program_serves_other_lists_of_words(model):
    """Their number is not part of what was compiled."""
    for words in (["ab"], ["ab", "cd"], ["ab", "cd", "ef"]):
        assert len(specsparse.generate(model, "x", sampling=WARM, max_tokens=3, bad_words=words).token_ids) == 3
    for ids, ignore in (([5, 6], True), ([], False), ([5, 6, 7], True)):
        sampling = WARM.merged(min_tokens=1, max_tokens=2, stop_token_ids=ids, ignore_eos=ignore)
        assert specsparse.generate(model, "x", sampling=sampling).token_ids


def test_no_text_where_none_is_wanted(model, warm):
    got = specsparse.generate(model, PROMPTS[0], sampling=WARM, seed=1, detokenize=False)
    assert got.token_ids == warm.token_ids and got.text == ""
    assert list(specsparse.stream(model, PROMPTS[0], sampling=WARM, seed=1, detokenize=False)) == []


# Log probabilities.


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


def test_logprobs_are_those_of_the_models_logits(model):
    sampling = WARM.merged(logprobs=3, prompt_logprobs=2, temperature=0.5, max_tokens=12)
    got = specsparse.generate(model, "abc", sampling=sampling, seed=0)
    ids = (*got.prompt_token_ids, *got.token_ids)
    wanted = log_softmax(model.logits(ids))
    start = len(got.prompt_token_ids)
    for i, entry in enumerate(got.logprobs):
        row = wanted[start + i - 1]
        check_entry(entry, ids[start + i], row, 3)
    assert got.prompt_logprobs[0] is None and len(got.prompt_logprobs) == start
    for i, entry in enumerate(got.prompt_logprobs[1:], 1):
        check_entry(entry, ids[i], wanted[i - 1], 2)


def check_entry(entry, token: int, row: np.ndarray, k: int) -> None:
    assert entry.token_id == token and entry.rank == 1 + (row > row[token]).sum()
    assert entry.logprob == pytest.approx(row[token], abs=2e-6)
    order = np.argsort(-row, kind="stable")[:k]
    assert [i for i, _ in entry.top] == order.tolist()
    assert [p for _, p in entry.top] == pytest.approx(row[order].tolist(), abs=2e-6)


def test_all_or_no_top_logprobs(model):
    got = specsparse.generate(
        model, ["abc", "de"], sampling=WARM, seed=0, logprobs=-1, prompt_logprobs=-1, max_tokens=2
    )
    assert all(len(t.top) == 300 for g in got for t in (*g.logprobs, *g.prompt_logprobs[1:]))
    assert np.exp([p for _, p in got[0].logprobs[0].top]).sum() == pytest.approx(1, abs=1e-5)
    none = specsparse.generate(model, "abc", sampling=WARM, logprobs=0, max_tokens=2)
    assert [t.top for t in none.logprobs] == [(), ()]
    assert specsparse.generate(model, "abc", sampling=WARM, max_tokens=2).logprobs is None


def test_logits_of_a_long_prompt_are_those_of_its_prefixes(model):
    ids = np.random.default_rng(0).integers(3, 300, CONTEXT)
    logits = model.logits(ids)
    assert logits.shape == (CONTEXT, 300) and logits.dtype == np.float32
    np.testing.assert_array_equal(model.logits(ids[:40]), logits[:40])
    greedy = specsparse.generate(model, ids[:40], max_tokens=1, ignore_eos=True)
    assert greedy.token_ids == (int(logits[39].argmax()),)


def test_stats_count_what_happened(model):
    got = specsparse.generate(model, "abcdef", max_tokens=5, ignore_eos=True)
    stats = got.stats
    assert stats.counters.num_emitted_tokens == stats.decode_tokens == 5 and stats.counters.num_rounds == 5
    assert stats.prefill_tokens == len(got.prompt_token_ids) - 1 and stats.counters.target_passes == 6
    assert min(stats.load_s, stats.prefill_s, stats.decode_s) > 0 and stats.compile_s >= 0


# Mistakes.


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([-1], "token id -1 is outside the vocabulary \\(0 to 299\\)"),
        ([5, 300], "token id 300 is outside"),
        ([2**70], "list of integers"),
        ([1.5], "list of integers"),
        ([True], "list of integers"),
        ([None], "list of integers"),
        ([5, "a"], "list of integers"),
        (np.array([[5, 6]]), "list of integers"),
        (None, "not NoneType"),
        ({"role": "user"}, "not dict"),
        ("\ud800", "surrogate"),
        ([{"role": "user"}], "content"),
        ([5] * (CONTEXT + 1), f"{CONTEXT + 1} tokens and the context holds {CONTEXT}"),
    ],
)
def test_bad_prompts(model, prompt, says):
    refused(says, specsparse.generate, model, prompt)
    refused(says, specsparse.stream, model, prompt)
    refused(says, specsparse.generate, model, [PROMPTS[0], prompt] if isinstance(prompt, str | list) else prompt)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": "x"}, "max_tokens=x must be a whole number"),
        ({"temprature": 1}, "did you mean temperature"),
        ({"temperature": -1}, "temperature=-1"),
        ({"n": 2}, "greedy"),
        ({"drafter": "promt_lookup"}, "did you mean prompt_lookup"),
        ({"drafter": 5}, "drafter must be .* not int"),
        ({"verifier": "greedy"}, "a verifier needs a drafter"),
        ({"drafter": "prompt_lookup", "verifier": "x"}, "verifier=x is unknown"),
        ({"drafter": "prompt_lookup", "verifier": 5}, "verifier must be .* not int"),
        ({"drafter": "prompt_lookup", "verifier": "token"}, "cannot verify"),
        ({"drafter": "prompt_lookup", "verifier": "greedy", "temperature": 1.0}, "choose one of match"),
        ({"seed": "x"}, "seed=x must be a whole number"),
        ({"seed": 10**40}, "seed=1000.* must be a whole number of 64 bits"),
        ({"seed": 10**5000}, "seed=a number of thousands of digits must"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"sampling": {"temperature": 1}}, "sampling must be SamplingParams, not dict"),
        ({"stop_token_ids": [300]}, "token id 300 is outside the vocabulary"),
        ({"logits_processors": [lambda ids, x: x[:3]]}, "returned shape \\(3,\\)"),
    ],
)
def test_bad_options(model, options, says):
    refused(says, specsparse.generate, model, "a", **options)
    refused(says, lambda: list(specsparse.stream(model, "a", **options)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"foo": 1}, "no option 'foo'"),
        ({"kv_dtype": ["f16"]}, r"kv_dtype=\['f16'\] must be one of"),
        ({"backend": ["native"]}, r"backend=\['native'\] must be a text"),
        ({"faithful_f16": "yes"}, "faithful_f16=yes must be true or false"),
        ({"float_weights": 1}, "float_weights=1 must be true or false"),
        ({"devices": None}, "devices=None: must be 1 or 2"),
        ({"devices": True}, "devices=True: must be 1 or 2"),
        ({"devices": 2.0}, "devices=2.0: must be 1 or 2"),
        ({"threads": "9" * 5000}, r"threads=9{57}\.\.\.: an integer"),
        ({"kv_dtype": "f8"}, "f32, f16, bf16"),
        ({"backend": "cuda"}, "native, reference, xla"),
        ({"threads": 0}, "threads=0"),
        ({"threads": 2.5}, "threads=2.5"),
        ({"context_length": 0}, "context_length=0"),
        ({"rope_base": "x"}, "rope_base"),
    ],
)
def test_bad_load_options(path, options, says):
    refused(says, specsparse.load, path, **options)


def test_what_jax_does_not_find_is_one_line(path, monkeypatch):
    def none():
        raise RuntimeError("Unable to initialize backend 'nosuch'")

    monkeypatch.setattr(jax, "default_backend", none)
    monkeypatch.setenv("JAX_PLATFORMS", "nosuch")
    refused("JAX_PLATFORMS=nosuch: JAX finds no such device here", specsparse.load, path)


@pytest.mark.parametrize("spin", ["x", "-1", "1.5", "9" * 5000])
def test_a_bad_spin_is_one_line(monkeypatch, spin):
    monkeypatch.setenv("SPECSPARSE_SPIN_US", spin)
    if not cpu.available():
        pytest.skip("no native kernels")
    refused("SPECSPARSE_SPIN_US=.* from 0", cpu.library.__wrapped__)


def test_arguments_that_are_none_are_one_line(model):
    refused("did you mean top_k", specsparse.SamplingParams, topk=1)
    assert specsparse.SamplingParams(top_k=3).top_k == 3
    refused("method .*'model'.* is unknown", specsparse.citation, ["model"])
    refused("rounds=True must be a whole number", specsparse.stream, model, "a", rounds=True)
    refused("certifies nothing", specsparse.certify, [])
    for name in ("driver", "known_bugs", "mutants"):
        refused(f"{name}=x must be true or false", specsparse.certify, "greedy", **{name: "x"})
    refused("vocab=x must be a whole number", specsparse.certify, "greedy", vocab="x")


def test_bad_models(model, tmp_path):
    refused("no such file", specsparse.load, tmp_path / "none.gguf")
    refused("did you mean .*smollm2-135m", specsparse.load, "smollm2-136m")
    refused("not NoneType", specsparse.load, None)
    refused("specsparse.load", specsparse.generate, "smollm2-135m", "a")
    refused("takes one prompt", specsparse.stream, model, ["a"])
    refused("takes one prompt", specsparse.stream, model, "a", sampling=WARM, n=2)
    for ids, says in (([], "empty"), ([300], "outside"), ("abc", "integers"), ([5] * (CONTEXT + 1), "context holds")):
        refused(says, model.logits, ids)


@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_a_model_of_nan_ends_in_one_line(tmp_path, drafter):
    """Half-precision weights are not searched at load; the decode loop notices."""
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="F16", **SIZE)
    raw = open_gguf(path).tensors["blk.0.ffn_down.weight"].raw.tobytes()
    blob = path.read_bytes()
    assert blob.count(raw) == 1
    path.write_bytes(blob.replace(raw, np.full(len(raw) // 2, np.nan, np.float16).tobytes()))
    damaged = specsparse.load(path)
    refused("m.gguf.* hold NaN", specsparse.generate, damaged, "abab", max_tokens=3, drafter=drafter)


def test_overrides_change_the_model(path, model):
    shorter = specsparse.load(path, context_length=32, kv_dtype="f32")
    assert shorter.config.context_length == 32
    assert len(specsparse.generate(shorter, "a", ignore_eos=True).token_ids) == 31
    turned = specsparse.load(path, rope_base=500.0)
    ids = list(range(3, 30))
    assert np.abs(turned.logits(ids) - model.logits(ids)).max() > 1e-3


# What a newcomer meets first.


def test_newcomer_sees_the_public_names():
    """They are imported when first used; TAB and `help` show them all the same."""
    assert {"load", "generate", "stream", "certify", "UserError"} <= set(specsparse.__all__) <= set(dir(specsparse))
    assert specsparse.UserError is UserError
    assert {name for name in dir(specsparse) if not name.startswith("__")} == set(specsparse.__all__)


def test_newcomer_catches_a_public_error(model):
    """What is raised is a `UserError` or a public subclass, whose name a traceback may show."""
    for call in (
        lambda: specsparse.SamplingParams(temperature=-1),
        lambda: specsparse.get_drafter("suffix", gamma=0),
        lambda: specsparse.generate(model, "x", max_tokens=-1),
        lambda: specsparse.load("llama-2-7b", download="no"),
    ):
        with pytest.raises(specsparse.UserError) as caught:
            call()
        assert not caught.type.__name__.startswith("_")
