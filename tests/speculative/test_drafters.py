"""The contract every drafter keeps, and what a round trip through the verifiers does to each."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine.noise import NoiseStream, uniform
from specsparse.errors import UserError
from specsparse.speculative.base import ROOT, Draft, Drafted, Drafter, DraftKind
from specsparse.speculative.drafters import DRAFTERS, get_drafter
from specsparse.speculative.drafters.synthetic import Scripted
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers.draft_rules import match_verdict
from specsparse.testing.contract import CAPACITY, DRAFTER_CHECKS, GAMMA, VOCAB, DrafterCase, check_drafter
from specsparse.testing.drafting import draft_context, drafted_ids, model_case, tiny_model
from tests.cells import cells

V, C, K = VOCAB, CAPACITY, GAMMA
TRUTH = tuple(int(t) for t in np.random.default_rng(7).integers(0, V, C))
TREE = TreeTemplate.kary((2, 2))

CASES = {
    "prompt_lookup": lambda: get_drafter("prompt_lookup", gamma=K),
    "prompt_lookup_min_2": lambda: get_drafter("prompt_lookup", gamma=K, prompt_lookup_min=2, prompt_lookup_max=4),
    "ngram_simple": lambda: get_drafter("ngram-simple", draft_max=K, size_n=2, size_m=4),
    "ngram_map": lambda: get_drafter("ngram-map-k", draft_max=K, size_n=2, size_m=4, min_hits=2),
    "suffix": lambda: get_drafter("suffix", num_speculative_tokens=K, factor=1.5, offset=1),
    "recycle": lambda: get_drafter("recycle", gamma=K),
    "synthetic": lambda: get_drafter("synthetic", gamma=K, rate=0.6),
    "scripted_chain": lambda: get_drafter("scripted", gamma=K, accept=(2, 0, 6), vocab_size=V, truth=TRUTH),
    "scripted_tree": lambda: get_drafter("scripted", template=TREE, ends=(4, ROOT, 1), vocab_size=V, truth=TRUTH),
}

MODEL_CASES = {
    "model": ("model", {}),
    "model_sampled": ("model", {"temperature": 0.8}),
    "layer_skip_p_min": ("layer_skip", {"p_min": 0.3}),
    "sparse_self": ("sparse_self", {"share": 0.5, "temperature": 0.8}),
    "sparse_kv": ("sparse_kv", {"slots": 0, "window": 16}),
    "sparse_kv drawn": ("sparse_kv", {"temperature": 0.8}),
    "tree_wor": ("model", {"temperature": 0.8, "tree": get_tree("sampled_wor", widths=(2, 1, 1))}),
    "tree_dynamic": ("model", {"tree": get_tree("dynamic", total=K, depth=3, top_k=2)}),
    "lookup_head": ("lookup_head", {"ngram_min": 3}),
    "lookup_head drawn": ("lookup_head", {"ngram_min": 3, "temperature": 0.7}),
    "mixed": ("mixed", {"levels": 2}),
    "mixed of tables": ("mixed", {"levels": 0}),
    "eagle3_sampled": ("eagle3", {"temperature": 0.8}),
    "eagle3_dynamic": ("eagle3", {"tree": get_tree("dynamic", total=K, depth=3, top_k=2)}),
    "head_sampled": ("head", {"temperature": 0.8}),
    "dflash": ("dflash", {}),
    "dflash_sampled": ("dflash", {"temperature": 0.8}),
    "dflash_ddtree": ("dflash", {"tree": get_tree("ddtree", nodes=K, depth=3)}),
    "dflash_wor": ("dflash", {"temperature": 0.8, "tree": get_tree("sampled_wor", widths=(2, 1, 1))}),
    "dspark_sampled": ("dspark", {"temperature": 0.8}),
    "dspark_wor": ("dspark", {"temperature": 0.8, "tree": get_tree("sampled_wor", widths=(2, 1, 1))}),
    "head_dynamic": ("head", {"tree": get_tree("dynamic", total=K, depth=3, top_k=2)}),
}

# Every drafter and tree stays (`head` inside `lookup_head`); argmax and drawn drafts as chain and as tree, of a model,
# of the target's own layers and of heads. The slow ones pair them another way.
ORDINARY = (
    "layer_skip_p_min", "sparse_self", "sparse_kv", "tree_wor", "lookup_head", "mixed", "eagle3_dynamic",
    "dflash_ddtree",
)  # fmt: skip

judge = jax.jit(match_verdict)


@pytest.fixture(params=[*CASES, *cells(MODEL_CASES, ORDINARY)], scope="module")
def case(request, tmp_path_factory):
    if request.param in CASES:
        return DrafterCase(CASES[request.param]())
    source, options = MODEL_CASES[request.param]
    return DrafterCase(*model_case(tmp_path_factory.mktemp("model"), source, vocab=V, capacity=C, **options))


@pytest.mark.parametrize("check", DRAFTER_CHECKS, ids=lambda check: check.__name__)
def test_contract(case, check):
    check(case)


@dataclasses.dataclass(frozen=True)
class Bad(Drafter):
    """A chain of ones that breaks one rule."""

    wrong: str
    kind = DraftKind.ONE_HOT
    max_nodes = K

    def draft(self, params, state, ctx):
        batch, room = len(ctx.length), self.max_nodes + (self.wrong == "shape")
        last = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, axis=1)
        beyond = jnp.take_along_axis(ctx.tokens, jnp.minimum(ctx.length, C - 1)[:, None], axis=1)
        token = {"beyond": jnp.clip(beyond, 0, 1), "batch": last[:1], "id": last + V}.get(self.wrong, last)
        count = jnp.minimum(ctx.budget, K) if self.wrong != "budget" else jnp.full((batch,), K, jnp.int32)
        parents = TreeTemplate.chain(room).parents_array(batch) - int(self.wrong == "parents")
        draft = Draft(jnp.broadcast_to(token, (batch, room)), parents, count)
        return Drafted(draft, state, None if self.wrong == "cache" else ctx.cache)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("shape", "int32[3, 6] is needed"), ("budget", "budget of"), ("id", "ids lie in"), ("parents", "parent"),
        ("beyond", "beyond the length"), ("batch", "depends on its batch"), ("cache", "ctx.cache"),
    ],
)  # fmt: skip
def test_the_contract_refuses(wrong, words):
    with pytest.raises(AssertionError, match=re.escape(words)):
        check_drafter(Bad(wrong))


def test_the_contract_takes_a_chain_of_ones_and_says_so_to_a_newcomer():
    said = str(check_drafter(Bad("nothing"))).splitlines()
    assert said[0] == "Bad keeps the contract of a drafter:" and len(said) == 1 + len(DRAFTER_CHECKS)
    assert said[-1].endswith("Not asked here: its drafts are one-hot, no token is drawn.")


@dataclasses.dataclass(frozen=True)
class Drawn(Drafter):
    """Draws two tokens from a fixed q; `wrong` in one way or another."""

    wrong: str
    kind = DraftKind.SAMPLED
    max_nodes = 2

    def draft(self, params, state, ctx):
        batch, node = len(ctx.length), jnp.zeros((2,), jnp.int32) if self.wrong == "coin" else jnp.arange(2)
        q_V = jnp.array([0.4, 0.3, 0.2, 0.1, 0.0], jnp.float32)
        u_BK = uniform(
            ctx.seed[:, None], stream=NoiseStream.DRAFT, position=ctx.length[:, None], node=node[None].astype(jnp.int32)
        )
        drawn_V = jnp.array([0.1, 0.2, 0.3, 0.4, 0.0], jnp.float32) if self.wrong == "q" else q_V
        tokens = jnp.sum(jnp.cumsum(drawn_V)[None, None] <= u_BK[..., None], axis=2, dtype=jnp.int32)
        count = jnp.clip(ctx.budget, 0, 2)
        if self.wrong == "drops":
            count = jnp.where(tokens[:, 0] > 0, 0, count)
        scale = 2 if self.wrong == "mass" else 1
        q_BKV = jnp.broadcast_to(scale * q_V, (batch, 2, V))
        draft = Draft(tokens, TreeTemplate.chain(2).parents_array(batch), count, q_BKV)
        return [draft, state, ctx.cache] if self.wrong == "list" else Drafted(draft, state, ctx.cache)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("q", r"node \d are not drawn from the q .* variation of 0\.4"), ("coin", "node 1 are not drawn"),
        ("drops", "not drawn from the q"), ("mass", r"have the mass \[2"),
    ],
)  # fmt: skip
def test_the_contract_is_not_fooled_by_a_q_that_is_not_drawn_from(wrong, words):
    with pytest.raises(AssertionError, match=words):
        check_drafter(Drawn(wrong))


def test_a_drawn_chain_that_fooled_nobody_is_told_the_power_of_its_test():
    assert "1,024 drafts of each of 3 texts: an error of 0.17 (TV) is found with 95%." in str(check_drafter(Drawn("")))


@dataclasses.dataclass(frozen=True)
class Newcomer(Bad):
    """Counts as a newcomer would."""

    def draft(self, params, state, ctx):
        drafted = super().draft(params, state, ctx)
        if self.wrong == "numpy":
            np.asarray(ctx.tokens)
        if self.wrong == "if" and ctx.length[0] > 0:
            return drafted
        if self.wrong == "callback":
            shape = jax.ShapeDtypeStruct(drafted.draft.count.shape, jnp.int32)
            count = jax.pure_callback(lambda n: np.minimum(np.asarray(n), 1).astype(np.int32), shape, ctx.budget)
            return drafted._replace(draft=drafted.draft._replace(count=count))
        return drafted


@pytest.mark.parametrize("wrong", ["numpy", "if"])
def test_a_newcomer_to_tracing_gets_one_line(wrong, tmp_path):
    words = r"^Newcomer.draft is traced by jax.jit, and \S*test_drafters.py:\d+ asks .* jax.pure_callback [^\n]*$"
    with pytest.raises(AssertionError, match=words):
        check_drafter(Newcomer(wrong))
    model = tiny_model(tmp_path, vocab=V, capacity=C)
    for policy in (None, Fixed(2)):
        with pytest.raises(UserError) as error:
            specsparse.generate(model, [1, 2], max_tokens=4, drafter=Newcomer(wrong), policy=policy)
        assert re.search(words, str(error.value))


def test_a_newcomer_s_callback_and_list():
    check_drafter(Newcomer("callback"))
    with pytest.raises(AssertionError, match=r"Drawn\.draft returned list: a drafter returns Drafted"):
        check_drafter(Drawn("list"))


def test_a_plan_is_checked_on_a_tiny_model():
    check_drafter(get_drafter("layer_skip", gamma=3, layers=[0]))


# Scripted


@pytest.mark.parametrize("accepted", range(4))
def test_scripted_chain_accepts_what_it_is_told(accepted):
    drafter = Scripted.chain(3, (accepted,), vocab_size=V)
    ctx = draft_context([TRUTH[:10], TRUTH[:4]], capacity=C, budget=3)
    draft = jax.jit(drafter.draft)(jnp.array(TRUTH, jnp.int32), None, ctx).draft
    target = jnp.array([TRUTH[10:14], TRUTH[4:8]], jnp.int32)
    verdict = judge(draft, target)
    assert verdict.accepted.tolist() == [accepted] * 2
    np.testing.assert_array_equal(verdict.tokens[:, : accepted + 1], target[:, : accepted + 1])


@pytest.mark.parametrize("end", range(-1, TREE.size))
def test_scripted_tree_accepts_the_path_to_any_node(end):
    truth = jnp.array([TRUTH, TRUTH[::-1]], jnp.int32)
    drafter = Scripted(TREE, (ROOT, end), V)
    ctx = draft_context([TRUTH[:10], TRUTH[::-1][:4]], capacity=C, budget=TREE.size, round=3)
    draft = jax.jit(drafter.draft)(truth, None, ctx).draft
    rows = np.asarray(ctx.length)[:, None] + np.array((0, *TREE.depths))[None]
    verdict = judge(draft, jnp.asarray(np.take_along_axis(np.asarray(truth), rows, axis=1)))
    path = list(TREE.path(end))
    assert [n for n in verdict.nodes[0].tolist() if n >= 0] == path
    assert verdict.accepted.tolist() == [len(path)] * 2
    for children in TREE.children:  # siblings never coincide
        assert len({int(draft.tokens[0, node]) for node in children}) == len(children)


def test_scripted_is_wrong_beyond_the_truth():
    ctx = draft_context([TRUTH[:4]], capacity=C, budget=3)
    for truth in ((), TRUTH[:4]):
        draft = jax.jit(Scripted.chain(3, (3,), vocab_size=V, truth=truth).draft)(None, None, ctx).draft
        assert drafted_ids(draft) == [1, 1, 1]


# Registry


NEEDED = {name: {"path": "x"} for name in ("eagle3", "dflash", "dspark")}


def test_every_name_makes_a_drafter():
    for name in DRAFTERS.names():
        assert get_drafter(name, **({"scripted": {"accept": (1,)}} | NEEDED).get(name, {})).max_nodes >= 1


@pytest.mark.parametrize("name", NEEDED)
def test_a_published_head_without_a_path_is_told_before_a_model_is_loaded(name):
    for path in ({}, {"path": None}, {"path": ""}):
        with pytest.raises(UserError, match=r"drafter.path: a value is needed, .*hf://owner/repo or a name of"):
            get_drafter(name, **path)


@pytest.mark.parametrize(
    "alias", ["gamma", "num_speculative_tokens", "draft_max", "num_assistant_tokens", "prompt_lookup_num_tokens"]
)
def test_aliases_of_gamma(alias):
    assert {get_drafter(name, **{alias: 9}, **NEEDED.get(name, {})).max_nodes for name in DRAFTERS.names()} == {9}


def test_prompt_lookup_names():
    named = get_drafter("ngram", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2)
    assert named == get_drafter("prompt_lookup", gamma=5, ngram_max=4, ngram_min=2)
    assert get_drafter("prompt_lookup", ngram_min=6).ngram_max == 6


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("promt_lookup", {}, ["drafter=promt_lookup", "did you mean prompt_lookup?"]),
        ("zzz", {}, ["drafter=zzz", "suffix", "scripted"]),
        ("prompt_lookup", {"ngram_maks": 3}, ["drafter.ngram_maks", "did you mean ngram_max?"]),
        ("prompt_lookup", {"gamma": 0}, ["drafter.gamma=0", "at least 1 and at most 512"]),
        ("prompt_lookup", {"gamma": 4.0}, ["drafter.gamma=4.0", "a whole number"]),
        ("prompt_lookup", {"gamma": True}, ["drafter.gamma=True", "a whole number"]),
        ("prompt_lookup", {"gamma": "4"}, ["drafter.gamma=4 must be a whole number"]),
        ("prompt_lookup", {"gamma": 4, "draft_max": 5}, ["drafter.gamma", "drafter.draft_max", "one"]),
        ("prompt_lookup", {"ngram_max": 2, "ngram_min": 3}, ["ngram_max=2", "ngram_min=3"]),
        ("suffix", {"factor": 0}, ["drafter.factor"]),
        ("suffix", {"min_match": 65}, ["min_match=65", "longest=64"]),
        ("synthetic", {"rate": 1.5}, ["drafter.rate=1.5"]),
        ("synthetic", {"process": "poisson"}, ["poisson", "geometric", "minimum_variance"]),
        ("synthetic", {"rate": 0.5, "length": 2}, ["one of rate, length and rates"]),
        ("synthetic", {"gamma": 3, "length": 5}, ["5", "1..4"]),
        ("synthetic", {"rates": (0.5, 0.6)}, ["not increase"]),
        ("synthetic", {"rates": "ab"}, ["drafter.rates=ab", "must be a list"]),
        ("scripted", {"gamma": 3, "accept": (4,)}, ["scripted"]),
        ("model", {"model": 3}, ["drafter.model=3 must be a GGUF file"]),
        ("model", {"path": [1]}, ["drafter.path=[1] must be a GGUF file"]),
        ("model", {"model": {"a": 1}}, ["drafter.model={'a': 1} must be a GGUF file"]),
        ("scripted", {"template": 3}, ["drafter.template=3 must be a TreeTemplate"]),
        ("dflash", {"path": {"a": 1}}, ["drafter.path={'a': 1} must be a folder"]),
        ("scripted", {"template": TREE, "ends": (0,), "vocab_size": 2}, ["vocab_size=2"]),
    ],
)
def test_bad_options_are_refused_in_one_line(name, options, words):
    with pytest.raises(UserError) as error:
        get_drafter(name, **options)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_registering(monkeypatch):
    monkeypatch.setattr(DRAFTERS, "_homes", dict(DRAFTERS._homes))
    monkeypatch.setattr(DRAFTERS, "aliases", dict(DRAFTERS.aliases))
    specsparse.register("mine", Bad, aliases=("my-own",))
    assert specsparse.get_drafter("my-own", wrong="nothing") == Bad("nothing")
    with pytest.raises(UserError, match="mine"):
        specsparse.register("mine", Bad)
    with pytest.raises(UserError, match=r"drafter\.rwong is no option of mine; did you mean wrong\?"):
        get_drafter("mine", rwong="nothing")
