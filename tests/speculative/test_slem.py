"""A draft model with another vocabulary, by string-level exact match (SLEM): its text in the target's tokens, and the
target's tokens in its own."""

import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.method import load_drafter
from specsparse.speculative.base import DraftKind
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.slem import StringState, Translator
from specsparse.speculative.policies.base import PMin
from specsparse.speculative.vocab import intersect
from tests.cells import cells
from tests.speculative.two_vocabularies import gpt_2_and_llama, write_pair

PROMPTS = ["hello world hello", "the abcabcabc\nand\n", "été 12's\n\n"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return {name: specsparse.load(path) for name, path in write_pair(tmp_path_factory.mktemp("pair")).items()}


def translator(target, draft):
    sizes = {"target_size": target.vocab_size, "draft_size": draft.vocab_size}
    return Translator(target, draft, intersect(target, draft, **sizes))


TEXTS = [
    "hello world",
    "One.\n\nTwo three\n\nfour  five\n 12 x",
    "The quick brown fox,\n  jumps\nover 12 lazy dogs.\n",
    "naïve café — 東京 🙂!",
    "a",
    "",
]


def check_translation(target, draft):
    """A text read is what the draft's tokenizer makes of it, and written again it is the target's tokens."""
    one = translator(target, draft)
    for text in TEXTS:
        ids = target.encode(text, add_special=True)
        read = one.read(ids)
        assert draft.decode(read) == text
        assert read == draft.encode(text, add_special=True)
        for cut in range(len(ids) + 1):
            front = one.read(ids[:cut])
            rest = read[len(front) :]
            if read[: len(front)] == front and target.encode_bytes(b"".join(map(target.token_bytes, ids))) == ids:
                written = one.write(ids[:cut], rest)
                assert target.decode(ids[:cut] + written) == text
    return one


@pytest.mark.parametrize(("target", "draft"), [("bpe", "spm"), ("spm", "bpe")])
def test_slem_reads_and_writes_text(pair, target, draft):
    check_translation(pair[target].tokenizer, pair[draft].tokenizer)


def test_slem_with_the_vocabularies_of_gpt_2_and_llama():
    gpt, llama = gpt_2_and_llama()
    there, back = check_translation(gpt, llama), check_translation(llama, gpt)
    ids = gpt.encode("The capital of France is")
    said = [d for d in llama.encode("Paris, of course.") if d != llama.bos_id]
    assert there.write(ids, said) == gpt.encode(" Paris, of course.")
    assert there.write(ids, [*llama.encode_bytes(b" Paris"), llama.eos_id, 5]) == [*gpt.encode(" Paris"), gpt.eos_id]
    # A draft that goes on inside a word is cut with what is before it, as far as that keeps the committed tokens.
    assert back.write(llama.encode("walk"), gpt.encode("ing")) == llama.encode_bytes(b"ing")
    assert there.write([gpt.eos_id], llama.encode("Hello there")) == gpt.encode("Hello there")
    assert back.write([llama.bos_id], gpt.encode("Hello there")) == llama.encode("Hello there")


def test_slem_special_ids_are_never_text(pair):
    bpe, spm = pair["bpe"].tokenizer, pair["spm"].tokenizer
    one = translator(bpe, spm)
    ids = [1, *bpe.encode("the"), 2, 0, *bpe.encode("he")]  # <|im_start|>the<|im_end|><|endoftext|>he
    assert one.read(ids) == [spm.bos_id, *spm.encode("the"), spm.eos_id, spm.eos_id, *spm.encode("he")]
    assert one.write(bpe.encode("he"), [*spm.encode_bytes(b" the"), spm.eos_id, 9]) == [*bpe.encode(" the"), 2]
    assert one.write([], [spm.unknown_id, *spm.encode("the")]) == []
    # A model may have more ids than its tokenizer: they are no text, and not looked up.
    assert one.read([*bpe.encode("the"), 300]) == one.read(bpe.encode("the"))
    assert one.write([300], [*spm.encode_bytes(b" the"), 309]) == bpe.encode("the")


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    "warm": SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=60, ignore_eos=True),
}
METHODS = {
    "greedy": ("bpe", "greedy", "greedy", {}),
    "match_drawn": ("spm", "warm", "match", {"temperature": 0.7}),
    "p_min": ("bpe", "warm", "match", {"policy": PMin(5, 0, 0.05)}),
}


# Argmax drafts for the other target are in `test_slem_streams_and_stops`.
@pytest.mark.parametrize("method", cells(METHODS, ["match_drawn"]))
def test_slem_emits_the_plain_tokens(pair, method):
    target, sampling, verifier, options = METHODS[method]
    model, draft = pair[target], pair["spm" if target == "bpe" else "bpe"]
    options = options if "policy" in options else {"gamma": 4, **options}
    drafter = get_drafter("model", path=draft, vocabulary="slem", **options)
    plain = specsparse.generate(model, PROMPTS, sampling=SAMPLINGS[sampling], seed=5)
    got = specsparse.generate(model, PROMPTS, sampling=SAMPLINGS[sampling], seed=5, drafter=drafter, verifier=verifier)
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]
    assert [g.text for g in got] == [g.text for g in plain]
    counters = [g.stats.counters for g in got]
    assert sum(c.num_draft_tokens for c in counters) > 60
    assert all(c.times.draft > 0 for c in counters)  # the rounds are stepped
    assert all(len(r) == 3 for r in [plain, got])


def test_slem_streams_and_stops(pair):
    drafter = get_drafter("model", model=pair["spm"], vocabulary="slem", gamma=3)
    options = {"max_tokens": 40, "ignore_eos": True, "seed": 1}
    plain = specsparse.generate(pair["bpe"], PROMPTS[0], **options)
    assert "".join(specsparse.stream(pair["bpe"], PROMPTS[0], drafter=drafter, **options)) == plain.text
    stop = plain.text[10:13]
    cut = specsparse.generate(pair["bpe"], PROMPTS[0], drafter=drafter, stop=stop, **options)
    assert cut.text == plain.text[: plain.text.index(stop)]


def test_slem_keeps_what_its_cache_holds(pair):
    """Draft tokens that the text goes on with are not fed again, and none that it does not."""
    spec = get_drafter("model", model=pair["spm"], vocabulary="slem", gamma=4)
    made = load_drafter(pair["bpe"], spec)
    drafter, bpe = made.drafter, pair["bpe"].tokenizer
    assert made.about["vocabulary"]["method"] == "slem" and "slem" in made.notes[0]
    tokens = np.zeros((1, 64), np.int32)
    ids = bpe.encode("hello world and the")
    tokens[0, : len(ids)] = ids
    length = np.array([len(ids)], np.int32)
    first = drafter.read_text(None, tokens, length)
    assert first.kept[0] == 0 and first.length[0] == len(translator(bpe, pair["spm"].tokenizer).read(ids))

    class State:
        text, held = first._replace(ids=first.ids.copy()), first.length - 1

    assert drafter.read_text(State, tokens, length).kept[0] == first.length[0] - 1
    State.held = first.length
    State.text.ids[0, first.closed[0]] += 1  # those before are not read again
    assert drafter.read_text(State, tokens, length).kept[0] == first.closed[0] < first.length[0]


LONG = (
    "The quick brown fox,\n  jumps over 12 lazy dogs. na\u00efve caf\u00e9 \u6771\u4eac and the other one said hello "
)


@pytest.mark.parametrize(("target", "draft"), [("bpe", "spm"), ("spm", "bpe")])
def test_slem_reads_on_what_it_would_read_whole(pair, target, draft):
    """Whatever is committed a round, and with special tokens between; each token is read a bounded number of times."""
    target, draft = pair[target], pair[draft]
    spec = get_drafter("model", model=draft, vocabulary="slem", gamma=4)
    drafter = load_drafter(target, spec).drafter
    encode, special = target.tokenizer.encode, sorted(target.tokenizer.special_ids)[:2]
    ids = encode(LONG, add_special=True) + special + encode(LONG * 3) + special[:1] + encode(LONG * 20)
    tokens = np.array([ids, ids[::-1]], np.int32)
    rng, length, state, reads, tokens_read = np.random.default_rng(0), 0, None, 0, 0
    while length < len(ids):
        length = min(length + int(rng.integers(1, 7)), len(ids))
        got = drafter.read_text(state, tokens, np.array([length, length], np.int32))
        whole = drafter.read_text(None, tokens, np.array([length, length], np.int32))
        assert (got.length == whole.length).all() and (got.ids == whole.ids).all()
        assert (got.closed <= got.length).all() and (got.read >= (0 if state is None else state.text.read)).all()
        reads, tokens_read = reads + 1, tokens_read + int(length - got.read[0])
        behind = got.ids.copy()
        behind[np.arange(behind.shape[1]) >= got.length[:, None]] = 7  # a draft behind the text is none of it
        state = StringState(None, got._replace(ids=behind), got.length, np.zeros(2, np.int32))
    assert reads > 300 and tokens_read < 30 * reads  # the words since the last that follows a word, not the text


def test_slem_drafts_are_one_hot(pair):
    spec = get_drafter("model", model=pair["spm"], vocabulary="slem", temperature=0.8)
    assert spec.kind is DraftKind.ONE_HOT and not spec.tree
    sampling = SamplingParams(temperature=0.9, max_tokens=20)
    with pytest.raises(UserError, match="verifier=token cannot verify one_hot chain drafts") as error:
        specsparse.generate(pair["bpe"], "hello", sampling=sampling, drafter=spec, verifier="token")
    assert "drafter.temperature" not in str(error.value)


@pytest.mark.slow  # its drafts are one-hot chains, and `block` weighs those of others
def test_slem_runs_under_a_verifier_of_one_hot_drafts(pair):
    sampling = SamplingParams(temperature=0.9, max_tokens=30, ignore_eos=True)
    drafter = get_drafter("model", model=pair["spm"], vocabulary="slem", gamma=3)
    got = specsparse.generate(pair["bpe"], PROMPTS, sampling=sampling, seed=2, drafter=drafter, verifier="block")
    assert all(len(g.token_ids) == 30 for g in got)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tree": "static"}, "leave tree"),
        ({"draft_vocab": 100}, "draft_vocab"),
        ({"special_tokens": "target"}, "special_tokens"),
    ],
)
def test_slem_mistakes_are_one_line(options, words):
    with pytest.raises(UserError) as error:
        get_drafter("model", model="draft.gguf", vocabulary="slem", **options)
    assert words in str(error.value) and "\n" not in str(error.value)


REAL = {
    "tli": (0.8, {"gamma": 2, "vocabulary": "tli"}),
    "slem": (0.8, {"gamma": 2, "vocabulary": "slem"}),
    "itself": (0.0, {"gamma": 3, "vocabulary": "slem"}),
}


@pytest.mark.slow  # two tiny models write their plain text above, and the vocabularies of GPT-2 and Llama are real
@pytest.mark.parametrize("method", REAL)
def test_slem_and_tli_on_smollm2(smollm2, pair, method):
    """The shipped model with a tiny Llama of another vocabulary, and by way of text with itself: the text it writes
    alone. What it drafts for itself is accepted, so its cache and its tokens are the right ones."""
    temperature, given = REAL[method]
    options = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True, "seed": 3}
    plain = specsparse.generate(smollm2, "Once upon a time", **options)
    drafter = get_drafter("model", model=smollm2 if method == "itself" else pair["spm"], **given)
    got = specsparse.generate(smollm2, "Once upon a time", drafter=drafter, verifier="match", **options)
    assert got.token_ids == plain.token_ids and got.stats.counters.num_draft_tokens > 0
    if method == "itself":
        assert got.stats.counters.num_rounds <= 8
