"""Where texts end, their counters and times end too; and what a batch took is told once.

The model writes one character a token, so that a text says where it ends. The truth is the host loop, whose rounds are
watched one by one.
"""

import itertools
import sys

import jax
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine.generate import LoopCounters
from specsparse.runtime import results
from specsparse.runtime import session as sessions
from specsparse.runtime.loops import Note, RoundLog
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.runtime.metrics import STAGES, Counters, Times, from_dict, rates, to_dict
from specsparse.runtime.session import Request, Session
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.policies import get_policy
from specsparse.testing import write_tiny_gguf
from tests.cells import cells

LETTERS = [3 + b for b in b"abcd"]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, allowed_token_ids=LETTERS)
AUTO_OFF = get_policy("auto_off", v=(1.0, 1.3, 1.6, 1.9, 2.2), gamma=4, inner="fixed", every=2, probe_share=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return specsparse.load(write_tiny_gguf(path, n_layers=1, vocab_size=300, context_length=96))


@pytest.fixture(scope="module")
def free(model):
    """The whole text, and int[rounds] each of the counters after every round of prompt lookup."""
    seen = []

    def watch(view):
        seen.append(jax.tree.map(np.array, view.after.counters))

    made = specsparse.generate(model, "abcabd", sampling=SAMPLING, seed=4, **fast(), watch=watch)
    return made, jax.tree.map(lambda *a: np.stack(a)[:, 0], *seen)


def fast(policy=None):
    given = {} if policy is None else {"policy": policy}
    return {"drafter": get_drafter("prompt_lookup", gamma=4), "verifier": "match", **given}


def unique(text: str, end: int) -> str:
    """The shortest string that ends there and nowhere before."""
    return next(text[at:end] for at in range(end - 1, -1, -1) if text.find(text[at:end]) == at)


def streamed(*args, **options):
    stream = specsparse.stream(*args, **options)
    pieces = list(stream)
    assert "".join(pieces) == stream.generation.text
    return stream.generation


def stepped(*args, **options):
    return specsparse.generate(*args, **options, loop="host")


WAYS = [specsparse.generate, streamed, stepped]


# Stop strings.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", [1, 5, 16, 17, 40])
def test_plain_decoding_takes_a_round_a_token(model, free, way, end):
    text = free[0].text
    got = way(model, "abcabd", sampling=SAMPLING, seed=4, stop=unique(text, end))
    assert len(got.token_ids) == got.stats.decode_tokens == end and got.finish_reason == "stop"
    c = got.stats.counters
    assert (c.num_rounds, c.num_emitted_tokens, c.target_passes) == (end, end, end + 1)
    assert rates(c)["tokens_per_target_pass"] == 1.0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", [3, 16, 29, 47])
def test_counters_are_those_after_the_round_that_ended_the_text(model, free, way, end):
    whole, after = free
    got = way(model, "abcabd", sampling=SAMPLING, seed=4, stop=unique(whole.text, end), **fast())
    assert got.token_ids == whole.token_ids[:end]
    last = int(np.searchsorted(after.emitted, end))
    assert after.emitted[-1] > after.emitted[last] and after.accepted[-1] > after.accepted[last]
    c = got.stats.counters
    assert (c.num_rounds, c.num_emitted_tokens) == (last + 1, end)
    found = (c.num_drafts, c.num_draft_tokens, c.num_tested, c.num_accepted_tokens)
    assert found == tuple(int(a[last]) for a in (after.drafts, after.drafted, after.tested, after.accepted))
    assert c.num_accepted_tokens_per_pos == tuple(after.accepted_at[last].tolist())
    assert (c.alpha, c.alpha_var) == (after.alpha[last], after.alpha_var[last])
    c.validate()


def test_the_policy_is_reported_where_the_text_ends(model, free):
    options, after = {"sampling": SAMPLING, "seed": 4, **fast(AUTO_OFF)}, []

    def watch(view):
        now = view.session.state
        after.append((int(now.counters.emitted[0]), view.session.policies()[0]))

    whole = specsparse.generate(model, "abcabd", **options, watch=watch)
    emitted, reports = zip(*after, strict=True)
    last = int(np.searchsorted(emitted, 21))
    assert 0 < reports[last].rounds_off < reports[-1].rounds_off
    for way in WAYS:
        got = way(model, "abcabd", **options, stop=unique(whole.text, 21))
        assert got.stats.policy == reports[last]


def test_a_text_of_a_batch_ends_as_it_does_alone(model):
    options = {"sampling": SAMPLING, "seed": 4, **fast()}
    prompts = ["abcabd", "cad", "bb"]
    stop = specsparse.generate(model, prompts[1], **options).text[2:9]
    together = specsparse.generate(model, prompts, **options, stop=stop, common_noise=True)
    for prompt, got in zip(prompts, together, strict=True):
        alone = stepped(model, prompt, **options, stop=stop)
        assert got.token_ids == alone.token_ids and got.finish_reason == alone.finish_reason
        a, b = (to_dict(g.stats.counters) for g in (got, alone))
        assert {**a, "times": None} == {**b, "times": None}
        assert a["num_rounds"] <= a["num_emitted_tokens"]
    assert len(together[1].token_ids) == 9 and any(len(g.token_ids) > 32 for g in together)


class Clock:
    """A second passes with each look at it."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1
        return self.now


def test_the_time_ends_with_the_text(model, free, monkeypatch):
    """A call of the loop takes a second: 16 rounds at once, 4 of a stream, 1 of the host's."""
    for way, seconds in zip(WAYS, (1 + 5 / 16, 5 + 1 / 4, 21), strict=True):
        options = {"sampling": SAMPLING, "seed": 4, "stop": unique(free[0].text, 21)}
        way(model, "abcabd", **options)
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "time", Clock())
            assert way(model, "abcabd", **options).stats.decode_s == pytest.approx(seconds)


def test_rounds_of_a_call_share_its_time():
    """Two sequences, calls of three rounds; the second text ends in the fifth round, the first before."""
    log = RoundLog()
    log.add(Times(prefill=2.0))
    for first, used in ((1, 3), (4, 3)):
        rounds = np.zeros((16, 2), np.int32)
        rounds[:used] = np.arange(first, first + used)[:, None]
        totals = np.stack([*[rounds] * 5, 2 * rounds, rounds], axis=-1)
        counters = LoopCounters(totals, np.stack([rounds, rounds], axis=-1).astype(np.float32))
        log.add(Times(total=6.0, draft=3.0, verify=1.0, sample=1.0, commit=0.5, host=0.5), Note(counters))
    with pytest.raises(AssertionError, match="token 13 of sequence 1"):
        log.end({1: 13})
    log.end({0: 4, 1: 9})
    now = log.at_ends(Note(jax.tree.map(lambda a: a[used - 1], counters)))
    assert now.counters.rounds.tolist() == [2, 5] and now.counters.emitted.tolist() == [4, 9]
    log.settle(5)
    wanted = {
        "prefill": 2.0,
        "total": 10.0,
        "draft": 5.0,
        "verify": 5 / 3,
        "sample": 5 / 3,
        "commit": 5 / 6,
        "host": 5 / 6,
    }
    assert vars(log.times) == pytest.approx(wanted)


# min_tokens.


LEAST = list(itertools.product(WAYS, [{}, fast()], [0, 1, 7, 8, 30], ["a", "cab", ["aa", "d"]]))


@pytest.mark.parametrize(
    ("way", "options", "least", "stop"), cells(LEAST, [c for c in LEAST if c[0] is WAYS[0] or c[2] in (0, 7)])
)
def test_a_stop_string_ends_no_text_before_min_tokens(model, free, way, options, least, stop):
    """vLLM's rule: one of the tokens after the first `min_tokens` has to complete it; what came before stays."""
    text, stops = free[0].text, [stop] if isinstance(stop, str) else stop
    ends = [n for n in range(least + 1, len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    got = way(model, "abcabd", sampling=SAMPLING, seed=4, stop=stop, min_tokens=least, **options)
    assert len(got.token_ids) == (ends[0] if ends else len(text))
    cut = max((len(s) for s in stops if ends and text[: ends[0]].endswith(s)), default=0)
    assert got.text == text[: len(got.token_ids) - cut]
    assert got.finish_reason == ("stop" if ends else "length")


# Times.


@pytest.mark.parametrize("way", WAYS)
def test_times_are_the_truth_or_none(model, way):
    stats = way(model, "abcabd", sampling=SAMPLING, seed=4, **fast()).stats
    times = stats.counters.times
    assert (times.total, times.prefill) == (stats.decode_s, stats.prefill_s) and times.total > 0
    if way is stepped:
        assert sum(getattr(times, name) for name in STAGES) == pytest.approx(times.total)
    else:
        assert [getattr(times, name) for name in STAGES] == [None] * len(STAGES)
    assert rates(stats.counters)["tokens_per_second"] == len(SAMPLING.allowed_token_ids) * 15 / stats.decode_s


@pytest.mark.parametrize("way", [specsparse.generate, stepped])
def test_times_of_a_batch_add_up_to_the_batchs(model, way):
    made = way(model, ["abcabd", "cad", "bb"], sampling=SAMPLING, seed=4, **fast())
    total = sum((g.stats.counters for g in made), Counters()).times
    stats = made[0].stats
    assert total.total == pytest.approx(stats.decode_s) and total.prefill == pytest.approx(stats.prefill_s)
    if way is stepped:
        assert sum(getattr(total, name) for name in STAGES) == pytest.approx(stats.decode_s)
    shares = [g.stats.counters.times.total / g.stats.counters.num_rounds for g in made]
    assert shares == pytest.approx([shares[0]] * 3)


def test_a_sum_of_times_has_the_stages_that_all_parts_have():
    split, bare = Times(total=2.0, draft=0.5, verify=1.5), Times(prefill=1.0, total=3.0)
    assert Times() + split == split + Times() == split
    assert (split + bare).draft is None and (split + bare).total == 5.0
    assert (split + split).verify == 3.0 and (split + split).sample is None


def test_counters_of_older_records_are_read():
    """They wrote 0 for a stage that was not measured."""
    old = {**to_dict(Counters(num_rounds=3)), "times": {**dict.fromkeys(STAGES, 0.0), "prefill": 1.0, "total": 2.0}}
    assert from_dict(old).times == Times(prefill=1.0, total=2.0)
    timed = {**old, "times": {**old["times"], "draft": 0.5, "verify": 1.5}}
    assert from_dict(timed).times == Times(prefill=1.0, total=2.0, draft=0.5, verify=1.5, sample=0, commit=0, host=0)
    assert from_dict(to_dict(Counters(num_rounds=3))) == Counters(num_rounds=3)


# Results of many sequences.


def calls_of(function, *args) -> int:
    """Calls of Python and C functions that it makes."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def test_results_of_a_batch_take_linear_work(model):
    """A decoded batch of two, its rows repeated: the work is counted in calls, which for a square grow fourfold."""
    sampling = SAMPLING.merged(logprobs=0)
    method = resolve(MethodSpec(**fast(), sampling=sampling), model)
    done = Session(model, [Request(np.array([5, 6], np.int32), sampling, seed) for seed in (0, 1)], method)
    done.advance()
    two, stop_ids, sequences = done.state._replace(cache=None, drafter=None), done.job.stop_ids, done.sequences
    work = {}
    for times in (50, 100, 200):
        many = jax.tree.map(lambda a, times=times: np.concatenate([np.asarray(a)] * times), (two, stop_ids))
        done.sequences, done.state, done.job = sequences * times, many[0], done.job._replace(stop_ids=many[1])
        results.generations(done, {})
        work[times] = calls_of(results.generations, done, {})
    assert work[200] - work[100] < 2.2 * (work[100] - work[50])
