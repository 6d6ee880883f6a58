"""A draft model with another vocabulary, by token-level intersection (TLI): which tokens are the same, what the draft
reads, the distribution it draws from, and that the output keeps the target's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.loops import JIT, loop_for
from specsparse.runtime.method import MethodSpec, load_drafter, resolve
from specsparse.speculative import vocab
from specsparse.speculative.base import ROOT, DraftKind, Feedback
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.sources import draft_ids
from specsparse.speculative.proof.cases import outcomes, random_tables
from specsparse.speculative.proof.exact import continuations, output_probs, total_variation
from specsparse.speculative.proof.results import LOSSLESS_TV, MUTANT_TV
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import VERIFIERS, residuals
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.speculative.vocab import intersect
from specsparse.testing.drafting import draft_context
from tests.cells import cells
from tests.speculative.two_vocabularies import gpt_2_and_llama, write_pair

SIZES = {"target_size": 300, "draft_size": 309}
PROMPTS = ["hello world hello", "the abcabcabc", "été 12's\n\n"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return {name: specsparse.load(path) for name, path in write_pair(tmp_path_factory.mktemp("pair")).items()}


def bound(target, draft, capacity, **options):
    """The drafter and its weights."""
    spec = get_drafter("model", model=draft, gamma=6, **options)
    found = load_drafter(target, spec)
    return found.drafter, found.weights(capacity), found.about


def tokenizers(pair):
    return pair["bpe"].tokenizer, pair["spm"].tokenizer


# What is the same


def check_same(common, target, draft):
    """Every shared text token has the same bytes in both, every special one a special one, and no id stands twice."""
    t_ids, d_ids = common.target_ids.tolist(), common.draft_ids.tolist()
    assert len(set(t_ids)) == len(t_ids) == len(set(d_ids)) and t_ids == sorted(t_ids)
    for t, d in zip(t_ids, d_ids, strict=True):
        assert common.image(t) == [d]
        special = t in target.special_ids | target.stop_ids
        assert special == (d in draft.special_ids | draft.stop_ids)
        assert special or target.token_bytes(t) == draft.token_bytes(d) != b""
    for t in range(target.vocab_size):
        if t in target.special_ids:
            assert len(common.image(t)) <= 1 and set(common.image(t)) <= draft.special_ids | draft.stop_ids
        else:
            assert b"".join(map(draft.token_bytes, common.image(t))) == target.token_bytes(t)


def test_tokens_of_equal_bytes_are_the_same(pair):
    bpe, spm = tokenizers(pair)
    common = intersect(bpe, spm, **SIZES)
    check_same(common, bpe, spm)
    check_same(intersect(spm, bpe, target_size=309, draft_size=300), spm, bpe)
    by_text = {bpe.token_text(t): spm.token_text(d) for t, d in zip(common.target_ids, common.draft_ids, strict=True)}
    assert by_text["Ġhello"] == "▁hello" and by_text["Ċ"] == "<0x0A>" and by_text["Ã"] == "<0xC3>"
    assert by_text["e"] == "e"  # and not <0x65>, which no text is encoded as
    assert by_text["<|im_start|>"] == "<s>" and by_text["<|im_end|>"] == "</s>" and "<|endoftext|>" not in by_text
    assert [spm.token_text(i) for i in common.image(bpe.encode(" of")[0])] == ["▁", "o", "f"]
    facts = common.facts()
    assert facts["shared"] == common.texts == len(common.target_ids) - 2
    assert (
        facts["unmapped_target"]
        == 297 - facts["shared"]
        == sum(len(bpe.token_bytes(t)) > 0 and t not in common.target_ids for t in range(3, 300))
    )
    assert {"role": "eos", "text": "<|im_end|>", "target": 2, "draft": 2, "drafted": True} in facts["special"]
    assert "eos 2 as 2" in common.sentence() and "shared" in common.sentence()


def test_the_vocabularies_of_gpt_2_and_llama():
    gpt, llama = gpt_2_and_llama()
    common = intersect(gpt, llama, target_size=gpt.vocab_size, draft_size=llama.vocab_size)
    check_same(common, gpt, llama)
    assert common.texts == 18207 and common.image(gpt.eos_id) == [llama.eos_id]
    back = intersect(llama, gpt, target_size=llama.vocab_size, draft_size=gpt.vocab_size)
    assert back.texts == common.texts and back.image(llama.bos_id) == [] and back.unread == 2  # GPT-2 adds no BOS
    assert back.image(llama.encode_bytes(b"\xf0\x9f")[0]) == gpt.encode_bytes(b"\xf0")


class Written:
    """A vocabulary of tokens that are their own text; those in angle brackets are special."""

    type, add_bos, add_eos = "spm", False, False
    byte_ids = frozenset()

    def __init__(self, *tokens, text=(), eos=None, eot=None, bos=None):
        self.tokens, self.vocab_size = tokens, len(tokens)
        self.special_ids = frozenset(i for i, t in enumerate(tokens) if t[0] == "<" and t not in text)
        self.stop_ids = frozenset(tokens.index(t) for t in (eos, eot) if t)
        self.eos_id, self.eot_id, self.bos_id = (tokens.index(t) if t else None for t in (eos, eot, bos))
        self.unknown_id = None

    def token_text(self, index):
        return self.tokens[index]

    def token_bytes(self, index):
        return self.tokens[index].encode()

    def encode_bytes(self, data):
        return [self.tokens.index(c) for c in data.decode() if c in self.tokens]


def test_special_tokens_go_by_role_and_name_and_are_never_text():
    target = Written("a", "<eos>", "<turn>", "<tool>", "</s>", text=("</s>",), eos="<eos>", eot="<turn>")
    draft = Written("</s>", "<s>", "a", "<tool>", "<eos>", text=("<eos>",), eos="</s>", bos="<s>")
    draft.special_ids |= {0}
    common = intersect(target, draft, target_size=5, draft_size=5)
    assert {t: common.image(t) for t in range(5)} == {0: [2], 1: [0], 2: [0], 3: [3], 4: []}
    assert [(p.role, p.target, p.draft, p.drafted) for p in common.specials] == [
        ("eos", 1, 0, True), ("name", 3, 3, True), ("end", 2, 0, False),
    ]  # fmt: skip
    assert common.target_ids.tolist() == [0, 1, 3] and common.texts == 1


def test_special_ids_taken_for_text_are_caught(pair, monkeypatch):
    """The mutant: what is special is not told apart, so that `</s>` goes with a text of that name."""
    target = Written("a", "</s>", text=("</s>",))
    draft = Written("a", "</s>", eos="</s>")
    assert intersect(target, draft, target_size=2, draft_size=2).image(1) == []
    monkeypatch.setattr(vocab, "_specials", lambda tokenizer: frozenset())
    with pytest.raises(AssertionError):
        check_same(intersect(target, draft, target_size=2, draft_size=2), target, draft)


# What the draft reads


@pytest.mark.parametrize(("target", "draft"), [("bpe", "spm"), ("spm", "bpe")])
def test_a_text_is_read_token_by_token(pair, target, draft):
    t, d = pair[target], pair[draft]
    _, weights, _ = bound(t, d, 64)
    common = intersect(t.tokenizer, d.tokenizer, target_size=t.config.vocab_size, draft_size=d.config.vocab_size)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, t.config.vocab_size, n).tolist() for n in (1, 7, 40)] + [[t.tokenizer.bos_id, 9]]
    ctx = draft_context(texts, capacity=64, budget=1)
    text, every = jax.jit(draft_ids)(weights.images, ctx), np.tile(np.arange(64, dtype=np.int32), (len(texts), 1))
    ids_read = np.asarray(jax.jit(lambda text, images: text.at(images, every))(text, weights.images))
    bos = [d.tokenizer.bos_id] if d.tokenizer.add_bos else []
    for b, ids in enumerate(texts):
        wanted = [i for token in ids for i in common.image(token)]
        wanted = wanted if bos and common.image(ids[0]) == bos else bos + wanted
        assert text.length[b] == len(wanted)
        assert ids_read[b, : len(wanted)].tolist() == wanted


def softmax(x, temperature):
    x = x.astype(np.float64) / temperature
    e = np.exp(x - x.max())
    return e / e.sum()


def image_of(pair, ids):
    """What the "spm" draft reads for ids of the "bpe" target."""
    common = intersect(*tokenizers(pair), **SIZES)
    found = [i for token in ids for i in common.image(token)]
    bos = pair["spm"].tokenizer.bos_id
    return common, found if found[:1] == [bos] else [bos, *found]


# A trimmed vocabulary is one of a draft model of the same tokens in test_drafters_model.py.
@pytest.mark.parametrize("shape", cells(["chain", "wor", "trimmed"], ["wor"]))
def test_tli_q_is_the_drafts_distribution_on_the_shared_tokens(pair, shape):
    """Against the draft model's own logits after what it reads of each node's path, without any cache."""
    ids = [1, 2, 300 - 42, *range(100, 130)]
    extra = {"wor": {"tree": get_tree("sampled_wor", widths=(3, 1))}, "trimmed": {"draft_vocab": ids}}.get(shape, {})
    drafter, weights, about = bound(pair["bpe"], pair["spm"], 64, temperature=0.7, vocabulary="tli", **extra)
    assert about["vocabulary"]["method"] == "tli"
    texts = [[1, *pair["bpe"].tokenizer.encode(PROMPTS[0])], pair["bpe"].tokenizer.encode(PROMPTS[2])]
    ctx = draft_context(texts, capacity=64, budget=6, round=4)
    draft = jax.jit(lambda w, c: drafter.draft(w, drafter.init(w, c), c).draft)(weights, ctx)
    tokens, parents, q = (np.asarray(a) for a in (draft.tokens, draft.parents, draft.q))
    for b, text in enumerate(texts):
        assert draft.count[b] == 6
        used: dict[int, list[int]] = {}
        for node in range(6):
            path, at = [], int(parents[b, node])
            while at != ROOT:
                path, at = [int(tokens[b, at]), *path], int(parents[b, at])
            common, fed = image_of(pair, [*text, *path])
            if shape == "trimmed":
                keep = np.isin(common.target_ids, ids)
                common = dataclasses.replace(
                    common, target_ids=common.target_ids[keep], draft_ids=common.draft_ids[keep]
                )
            probs = common.probs(softmax(pair["spm"].logits(fed)[-1], 0.7))
            if shape == "wor":
                probs[used.setdefault(int(parents[b, node]), [])] = 0
                probs /= probs.sum()
                used[int(parents[b, node])].append(int(tokens[b, node]))
            np.testing.assert_allclose(q[b, node], probs, atol=2e-6)
            assert tokens[b, node] in common.target_ids and q[b, node, tokens[b, node]] > 0


ROLLED_BACK = [None, get_tree("static", widths=(2, 1, 1))]


@pytest.mark.parametrize("tree", cells(ROLLED_BACK, ROLLED_BACK[1:]))
def test_tli_a_rolled_back_cache_drafts_as_a_new_one(pair, tree):
    """Rounds that accept none, some and all, then a token that the draft lacks, reads as several, or not at all."""
    drafter, weights, _ = bound(pair["bpe"], pair["spm"], 64, **({} if tree is None else {"tree": tree}))
    K, rng = drafter.max_nodes, np.random.default_rng(0)
    texts = [[1, 60, 61], [0], [0, 270, 271, 299]]  # 0 and 299 are read as nothing
    init, draft = jax.jit(drafter.init), jax.jit(drafter.draft)
    state = init(weights, draft_context(texts, capacity=64, budget=K))

    @jax.jit
    def commit(weights, state, ctx, draft, target_Bn):
        return drafter.commit(weights, state, ctx, Feedback(draft, match_verdict(draft, target_Bn)))

    after_nothing = [0, 299, 263, 290, 0, 299]
    for number, odd in enumerate(after_nothing):
        ctx = draft_context(texts, capacity=64, budget=K, round=number)
        found = draft(weights, state, ctx)
        fresh = draft(weights, init(weights, ctx), ctx)
        jax.tree.map(np.testing.assert_array_equal, found.draft, fresh.draft)
        target = np.full((3, K + 1), 300, np.int32)
        for b, accept in enumerate(((0, 1, 2, 9, 9, 0)[number], 9, int(rng.integers(0, 4)))):
            row, emitted = 0, []
            while len(emitted) < accept:
                children = [i for i in range(int(found.draft.count[b])) if int(found.draft.parents[b, i]) == row - 1]
                if not children:
                    break
                target[b, row] = int(found.draft.tokens[b, children[-1]])
                emitted.append(int(target[b, row]))
                row = children[-1] + 1
            texts[b] += [*emitted, odd]
        after = draft_context(texts, capacity=64, budget=K, round=number)
        state = commit(weights, found.state, after, found.draft, jnp.asarray(target))


def test_rounds_run_in_one_program_but_for_drafts_of_text(pair):
    for vocabulary, in_one in {"auto": True, "tli": True, "slem": False}.items():
        spec = get_drafter("model", model=pair["spm"], vocabulary=vocabulary)
        method = resolve(MethodSpec(spec, sampling=SamplingParams()), pair["bpe"])
        assert (loop_for(pair["bpe"], method) is JIT) == in_one


# The distribution, enumerated


COMMON = ("a", "b", "c")
TARGET = Written(*COMMON, "ab")  # 4 tokens; the draft reads "ab" as two
DRAFT = Written("x", "c", "b", "y", "a", "<e>")  # two texts and a special token that the target lacks


def tli_rounds(kind, template, seed, *, draw=None, record=None):
    """Every draft of a draft model on its own vocabulary, and p. `draw`, `record`: mutants of q float64[D]."""
    common = intersect(TARGET, DRAFT, target_size=4, draft_size=6)
    rng = np.random.default_rng([seed, 5])
    p = random_tables(rng, vocab=4, depth=template.max_depth)
    own = {}

    def q_of(context, probs):
        read = tuple(i for token in context for i in common.image(token))
        own.setdefault(read, rng.dirichlet(np.full(6, 0.8)))
        return probs(own[read])

    def row(probs):
        def at(node, context, elders):
            q = q_of(context, probs)
            if kind is DraftKind.ONE_HOT:
                return residuals.one_hot(q, np.argsort(-q, kind="stable")[len(elders)])
            for token in elders if kind is DraftKind.WOR else ():
                q = residuals.remove(q, token)
            return q

        return at

    one_hot = kind is DraftKind.ONE_HOT
    found = outcomes(
        template, p, draw=row(draw or common.probs), record=row(record or draw or common.probs), one_hot=one_hot
    )
    return common, p, found


def tli_tv(rule, kind, template, seed=0, **mutant):
    _, p, found = tli_rounds(kind, template, seed, **mutant)
    length = template.max_depth + 1
    return total_variation(output_probs(rule, found, p, length), continuations(p, length)[0])


CASES = [
    (name, kind, template)
    for name, v in VERIFIERS.items()
    if v.lossless and not v.greedy_only
    for kind in DraftKind
    if kind in v.kinds
    for template in (
        TreeTemplate.chain(1),
        TreeTemplate.chain(2),
        *([TreeTemplate.kary((2, 1))] if v.tree and kind is not DraftKind.SAMPLED else []),
    )
]


@pytest.mark.parametrize(("name", "kind", "template"), CASES)
def test_tli_keeps_the_distribution_of_p(name, kind, template):
    for seed in range(3):
        assert tli_tv(VERIFIERS[name].rule, kind, template, seed) <= LOSSLESS_TV


def test_tli_covers_every_lossless_verifier():
    assert {name for name, *_ in CASES} >= {"token", "block", "mss", "wor", "kseq", "delta", "match", "tree_match"}


def _not_normalised(q_D):
    common = intersect(TARGET, DRAFT, target_size=4, draft_size=6)
    wide = np.zeros(4)
    wide[common.target_ids] = q_D[common.draft_ids]
    return wide


def _unmapped_kept(q_D):
    """Tokens that the target lacks are drafted as its token 0."""
    wide = _not_normalised(q_D)
    wide[0] += 1 - wide.sum()
    return wide


def _two_to_one(q_D):
    """A special token is drafted as a text, whose own q is what is recorded."""
    wide = _not_normalised(q_D)
    wide[1] += q_D[5]
    return wide / wide.sum()


MUTANTS = {
    "q is not normalised anew": {"record": _not_normalised},
    "q of unmapped tokens is kept": {"draw": _unmapped_kept, "record": _not_normalised},
    "unmapped tokens are drafted as another": {"draw": _unmapped_kept, "record": lambda q: tli_probs(q)},
    "a special id is drafted as a text": {"draw": _two_to_one, "record": lambda q: tli_probs(q)},
}


def tli_probs(q_D):
    return intersect(TARGET, DRAFT, target_size=4, draft_size=6).probs(q_D)


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["token", "block"])
def test_tli_mutants_are_caught(name, mutant):
    found = [
        tli_tv(VERIFIERS[name].rule, DraftKind.SAMPLED, TreeTemplate.chain(2), s, **MUTANTS[mutant]) for s in range(3)
    ]
    assert max(found) > MUTANT_TV


# Decoding


METHODS = {
    "greedy": ("greedy", 0.0, {}),
    "match": ("match", 0.8, {"temperature": 0.8}),
    "dynamic": ("tree_match", 0.8, {"tree": get_tree("dynamic", total=8, depth=3, top_k=3)}),
    "wor": ("tree_match", 0.8, {"temperature": 0.8, "tree": get_tree("sampled_wor", widths=(2, 1))}),
    "p_min": ("match", 0.0, {"p_min": 0.05}),
}


TEXTS = [*(("bpe", name) for name in METHODS), ("spm", "match")]


# Both directions, a chain and a tree. Argmax drafts at T = 0: `test_the_target_accepts_itself_by_tli`.
@pytest.mark.parametrize(("target", "method"), cells(TEXTS, [("bpe", "wor"), ("spm", "match")]))
def test_tli_emits_the_plain_tokens(pair, target, method):
    verifier, temperature, options = METHODS[method]
    model, draft = pair[target], pair["spm" if target == "bpe" else "bpe"]
    sampling = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True, top_k=40)
    plain = specsparse.generate(model, PROMPTS, sampling=sampling, seed=3)
    drafter = get_drafter("model", path=draft, vocabulary="tli", gamma=4, **options)
    got = specsparse.generate(model, PROMPTS, sampling=sampling, seed=3, drafter=drafter, verifier=verifier)
    assert [g.token_ids for g in got] == [g.token_ids for g in plain]
    assert sum(g.stats.counters.num_draft_tokens for g in got) > 60


@pytest.mark.slow  # tests/experiments/test_kinds.py runs `token`
@pytest.mark.parametrize("verifier", ["token", "block", "mss"])
def test_tli_runs_under_the_verifiers_of_p_and_q(pair, verifier):
    options = {"tree": get_tree("sampled_iid", widths=(2, 1))} if verifier == "mss" else {}
    drafter = get_drafter("model", model=pair["spm"], gamma=3, temperature=1.0, **options)
    sampling = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    got = specsparse.generate(pair["bpe"], PROMPTS, sampling=sampling, seed=1, drafter=drafter, verifier=verifier)
    counters = [g.stats.counters for g in got]
    assert all(len(g.token_ids) == 40 for g in got) and sum(c.num_accepted_tokens for c in counters) > 0


def test_the_target_accepts_itself_by_tli(pair):
    """All tokens are shared, so that nothing is lost on the way there and back."""
    drafter = get_drafter("model", model=pair["bpe"], gamma=4, vocabulary="tli")
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    got = specsparse.generate(pair["bpe"], PROMPTS, sampling=sampling, drafter=drafter, verifier="greedy")
    assert [g.stats.counters.num_rounds for g in got] == [6, 6, 6]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocabulary": "same"}, ["another vocabulary", "tokenizer bpe against spm", "vocabulary=tli"]),
        ({"vocabulary": "tlo"}, ["drafter.vocabulary=tlo", "tli"]),
        ({"vocabulary": "tli", "special_tokens": "target"}, ["special_tokens", "tli"]),
        ({"vocabulary": "tli", "draft_vocab": [299]}, ["draft_vocab", "spm.gguf"]),
        ({"vocabulary": "tli", "draft_vocab": [300]}, ["draft_vocab", "0..299"]),
    ],
)
def test_tli_mistakes_are_one_line(pair, options, words):
    with pytest.raises(UserError) as error:
        drafter = get_drafter("model", model=pair["spm"], **options)
        specsparse.generate(pair["bpe"], "hello", max_tokens=4, drafter=drafter)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_models_without_a_common_token_are_refused():
    from specsparse.speculative.drafters.draft_model import common_tokens

    class Model:
        path, config = "d.gguf", type("Config", (), {"vocab_size": 2})

        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

    with pytest.raises(UserError, match=r"d\.gguf has no token in common"):
        common_tokens(Model(Written("a", "<s>")), Model(Written("b", "<s>")))
