"""Results, seeds and lists of parameters of the public API, and what it says of a drafter that is none.

Promised: a seed that is not given is a new one, and the result says which; a batch under several distributions writes
what each prompt writes alone with its seed; prompts of a call have noise of their own; a result says what ended it and
how fast it came.
"""

import dataclasses

import jax.numpy as jnp
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine.noise import seed_at
from specsparse.errors import UserError
from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.drafters import lookup
from specsparse.speculative.policies.base import Fixed
from specsparse.testing import write_tiny_gguf

WARM = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return specsparse.load(write_tiny_gguf(path, n_layers=1, vocab_size=300, context_length=96))


def test_a_seed_that_is_not_given_is_a_new_one_and_the_result_has_it(model):
    three = [specsparse.generate(model, "ab", sampling=WARM) for _ in range(3)]
    assert len({g.seed for g in three}) == len(set(texts(three))) == 3
    again = specsparse.generate(model, "ab", sampling=WARM, seed=three[0].seed)
    assert (again.token_ids, again.seed) == (three[0].token_ids, three[0].seed)
    stream = specsparse.stream(model, "ab", sampling=WARM)
    list(stream)
    again = specsparse.generate(model, "ab", sampling=WARM.merged(seed=stream.generation.seed), seed=5)
    assert again.token_ids == stream.generation.token_ids


@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_each_prompt_has_its_parameters(model, drafter):
    sampling = [WARM.merged(temperature=0.0), WARM.merged(n=2, seed=9), WARM.merged(max_tokens=5, top_k=3)]
    prompts = ["abab", "cd", "efef"]
    found = specsparse.generate(model, prompts, sampling=sampling, seed=4, drafter=drafter)
    seeds = [found[0].seed, found[1].seed, found[3].seed]
    alone = [
        specsparse.generate(model, [p], sampling=sampling, seed=s) for p, sampling, s in zip(prompts, sampling, seeds)
    ]
    assert [g.token_ids for g in found] == [g.token_ids for group in alone for g in group]
    assert [g.seed for g in found] == [4, 9, 9, seed_at(4, 2)] and len(found[3].token_ids) == 5


def texts(generations):
    """Their token ids."""
    return [g.token_ids for g in generations]


def test_shared_noise_is_that_of_no_two_prompts_of_a_call(model):
    """One prompt 16 times gives 16 texts; place 0 has the seed, and each text is that of its own seed."""
    warm = WARM.merged(seed=4)
    found = specsparse.generate(model, ["ab"] * 16, sampling=WARM, seed=4)
    alone = specsparse.generate(model, "ab", sampling=WARM, seed=4)
    assert len(set(texts(found))) == len({g.seed for g in found}) == 16
    assert texts(specsparse.generate(model, ["ab"], sampling=WARM, seed=4)) == [alone.token_ids] == texts(found[:1])
    assert specsparse.generate(model, "ab", sampling=WARM, seed=found[5].seed).token_ids == found[5].token_ids
    for how in ({"sampling": warm}, {"sampling": warm, "seed": 9}, {"sampling": [WARM] * 16, "seed": 4}):
        assert texts(specsparse.generate(model, ["ab"] * 16, **how)) == texts(found), how
    drafted = specsparse.generate(model, ["ab"] * 16, sampling=WARM, seed=4, drafter="prompt_lookup", verifier="match")
    assert texts(drafted) == texts(found)
    assert len(set(texts(specsparse.generate(model, ["ab"] * 16, sampling=WARM)))) == 16


def test_shared_noise_can_be_asked_for_and_a_prompts_own_seed_has_no_place(model):
    with pytest.raises(UserError, match="common_noise=1 must be true or false"):
        specsparse.generate(model, "ab", common_noise=1)
    coupled = specsparse.generate(model, ["ab"] * 16, sampling=WARM, seed=4, common_noise=True)
    assert len(set(texts(coupled))) == 1 and {g.seed for g in coupled} == {4}
    own = specsparse.generate(model, ["ab"] * 16, sampling=[WARM.merged(seed=4)] * 8 + [WARM] * 8, seed=5)
    assert texts(own[:8]) == texts(coupled[:8]) and len(set(texts(own))) == 9
    pairs = specsparse.generate(model, ["ab"] * 8, sampling=WARM, seed=4, n=2)
    assert len(set(texts(pairs))) == 16 and pairs[0].token_ids == coupled[0].token_ids
    assert [g.seed for g in pairs[2:4]] == [seed_at(4, 1)] * 2


@pytest.mark.parametrize(("prompt", "count", "says"), [
    (["a", "b"], 3, "a list of 3 for 2 prompts"), ("a", 1, "one prompt that is in no list"), (["a"], 0, "a list of 0"),
])  # fmt: skip
def test_a_list_of_parameters_that_does_not_fit_is_refused(model, prompt, count, says):
    with pytest.raises(UserError, match=says):
        specsparse.generate(model, prompt, sampling=[WARM] * count)


def test_a_result_says_what_ended_it_and_how_fast_it_came(model):
    sampling = WARM.merged(allowed_token_ids=[3 + b for b in b"ab"], max_tokens=60, seed=2)
    free = specsparse.generate(model, "x", sampling=sampling)
    assert free.stop_reason is None
    assert free.tokens_per_second == pytest.approx(60 / free.stats.decode_s)
    by_text = specsparse.generate(model, "x", sampling=sampling, stop=["zz", free.text[20:32]])
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", free.text[20:32])
    stop = next(token for token in (3 + ord("a"), 3 + ord("b")) if token in free.token_ids)
    by_id = specsparse.generate(model, "x", sampling=sampling, stop_token_ids=[stop])
    assert (by_id.stop_reason, by_id.token_ids[-1]) == (stop, stop)
    eos = model.tokenizer.eos_id
    ended = specsparse.generate(model, "x", max_tokens=4, allowed_token_ids=[eos])
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def test_a_stream_gives_each_token_where_asked(model):
    drafter = specsparse.get_drafter("prompt_lookup", gamma=4)
    sampling = WARM.merged(allowed_token_ids=[3 + b for b in b"ab"], seed=2)
    stream = specsparse.stream(model, "abababab", sampling=sampling, drafter=drafter, rounds=1)
    pieces = list(stream.tokens())
    assert pieces == list(stream.generation.token_texts) and len(pieces) == 12
    assert stream.generation.stats.counters.num_accepted_tokens > 0


# A drafter that is none.


@dataclasses.dataclass(frozen=True)
class Echo(Drafter):
    """Proposes the last token again; `wrong` says in what it breaks the contract."""

    wrong: str = ""
    max_nodes: int = 2
    kind: DraftKind = DraftKind.ONE_HOT
    max_depth = property(lambda self: self.max_nodes)
    tree = False

    def init(self, params, ctx, *, hidden=None):
        return ctx.length

    def draft(self, params, state, ctx):
        count = jnp.minimum(ctx.budget, self.max_nodes)
        drafted = lookup.drafted(lookup.copy_chain(ctx, ctx.length - 1, count, max_nodes=self.max_nodes), state, ctx)
        off = {"below": -3, "above": 1000}.get(self.wrong, 0)
        drafted = drafted._replace(draft=drafted.draft._replace(count=drafted.draft.count + off))
        tokens = drafted.draft.tokens
        changed = {"short": tokens[:, :1], "float": tokens.astype(jnp.float32), "number": 3}.get(self.wrong, tokens)
        q = {"columns": jnp.ones((*tokens.shape, 7)), "half": jnp.ones((*tokens.shape, 300), jnp.bfloat16)}
        found = drafted._replace(draft=drafted.draft._replace(tokens=changed, q=q.get(self.wrong)))
        found = found._replace(cache=None) if self.wrong == "cache" else found
        found = found._replace(failed=drafted.draft.count) if self.wrong == "failed" else found
        return {"draft": found.draft, "tuple": tuple(found), "none": None}.get(self.wrong, found)

    def commit(self, params, state, ctx, feedback):
        return {"state": None, "shape": state[:, None]}.get(self.wrong, state)


@pytest.mark.parametrize(("wrong", "says"), [
    ("draft", "Echo.draft returned Draft: a drafter returns Drafted"),
    ("tuple", "Echo.draft returned tuple: a drafter returns Drafted"),
    ("short", r"tokens int32\[1, 1\] where int32\[1, 2\] is needed"),
    ("float", r"tokens float32\[1, 2\] where"),
    ("number", "tokens int where"),
    ("none", "Echo.draft returned NoneType: a drafter returns Drafted"),
    ("failed", r"Echo.draft returned failed int32\[1\] where bool\[1\] is needed: .* failed, if it is given, is bool"),
    ("cache", "Echo.draft returned None for the cache"),
    ("columns", r"Echo.draft returned q float32\[1, 2, 7\] where float32\[1, 2, 300\] is needed"),
    ("half", r"Echo.draft returned q bfloat16\[1, 2, 300\] where float32\[1, 2, V\] is needed"),
    ("state", r"Echo.commit returned the state None where init made int32\[1\]"),
    ("shape", r"Echo.commit returned the state int32\[1, 1\]"),
])  # fmt: skip
def test_a_drafter_that_returns_the_wrong_thing_is_told_what_it_returns(model, wrong, says):
    drawn = wrong in ("columns", "half")
    drafter = Echo(wrong, kind=DraftKind.SAMPLED if drawn else DraftKind.ONE_HOT)
    for policy in (None,) if drawn else (None, Fixed(1)):
        with pytest.raises(UserError, match=says) as caught:
            specsparse.generate(model, "ab", max_tokens=4, temperature=0.8 * drawn, drafter=drafter, policy=policy)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("facts", "says"), [
    ({"max_nodes": -1}, "Echo.max_nodes=-1 must be a whole number from 1 to 4096"),
    ({"max_nodes": "x"}, "Echo.max_nodes=x must be a whole number from 1 to 4096"),
    ({"kind": "one_hot"}, "Echo.kind=one_hot must be a DraftKind"),
])  # fmt: skip
def test_a_drafter_whose_facts_are_none_is_refused(model, facts, says):
    with pytest.raises(UserError, match=says):
        specsparse.generate(model, "ab", max_tokens=4, drafter=Echo(**facts))


@pytest.mark.parametrize("wrong", ["", "below", "above"])
def test_a_drafter_that_is_right_is_taken_and_one_that_counts_wrongly_changes_no_text(model, wrong):
    plain = specsparse.generate(model, "ab", max_tokens=4)
    found = specsparse.generate(model, "ab", max_tokens=4, drafter=Echo(wrong))
    assert found.token_ids == plain.token_ids and 0 <= found.stats.counters.num_draft_tokens <= 6
