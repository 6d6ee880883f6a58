"""What nobody chose pays on every task: the default policy replayed on texts that SmolLM2-135M wrote.

The target is a table of the recorded texts, so that rounds, drafts and verdicts are those of the real loop and only
time is reckoned, with tables of v(n). `data/rounds_smollm2.json` holds two built-in prompts of each task at two
temperatures: ids, and for drafters with a model how many of the first four tokens drafted at each place are right.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse.engine.cache import KVCache
from specsparse.engine.generate import Finish
from specsparse.engine.llama import ForwardOut
from specsparse.engine.sampling.params import SamplingParams
from specsparse.runtime import timing_cache
from specsparse.runtime.method import Method, MethodSpec, resolve
from specsparse.runtime.session import Request, Session
from specsparse.runtime.timing_cache import guessed_v, policy_times
from specsparse.speculative.base import Draft, DraftContext, Drafted, Drafter, DraftKind, Feedback
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.lookup import Either
from specsparse.speculative.policies import default_policy
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import get_verifier
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import tiny_model
from tests.cells import cells

TEXTS = json.loads((Path(__file__).parents[1] / "data" / "rounds_smollm2.json").read_text())
TASKS = tuple(dict.fromkeys(t["task"] for t in TEXTS))
WRITTEN, CAPACITY = 128, 1088
STATUS = timing_cache.kernels.status()

MACHINES = {
    "avx2": (1.0, 1.07, 1.22, 1.4, 1.62, 1.84, 2.06, 2.28, 2.54, 2.79, 3.05),
    "avx512": (1.0, 1.05, 1.12, 1.19, 1.27, 1.36, 1.47, 1.58, 1.73, 1.88, 2.03),
    "older kernels": (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.35, 2.7, 3.05, 3.4, 3.75),
}
"""v(1)..v(11) of SmolLM2-135M Q4_1, two cores, AVX2 in a busy hour (docs/vn.md); between measured rows by a line."""
ROUND = 0.02
"""What a round of the speculative loop takes besides, in plain steps, with a draft or without."""
COSTS = {"head": (0.06, 0.03), "smollm2-draft": (0.2, 0.0), "layer_skip": (0.8, 0.0)}
"""Drafters with a model: time of a drafted token, and of keeping up with the text each round, in plain steps."""
WITHOUT_MODEL = ("prompt_lookup", "ngram_simple", "ngram_map", "suffix")


@dataclasses.dataclass(frozen=True)
class Recorded(Drafter):
    """Drafts as a drafter with a model did: `params` is (text int32[B, C], right tokens int32[B, C] by length)."""

    nodes: int = 4
    kind = DraftKind.ONE_HOT
    tree = False
    max_nodes = max_depth = property(lambda self: self.nodes)

    def init(self, params: Any, ctx: DraftContext, *, hidden: jax.Array | None = None) -> None:
        return None

    def draft(self, params: Any, state: None, ctx: DraftContext) -> Drafted:
        text_BC, right_BC = params
        at_B1, node_K = ctx.length[:, None], jnp.arange(self.nodes, dtype=jnp.int32)[None]
        tokens_BK = jnp.take_along_axis(text_BC, jnp.minimum(at_B1 + node_K, CAPACITY - 1), axis=1)
        wrong_BK = node_K >= jnp.take_along_axis(right_BC, at_B1, axis=1)
        tokens_BK = jnp.where(wrong_BK, (tokens_BK + 1) % jnp.max(text_BC), tokens_BK)
        parents_BK = TreeTemplate.chain(self.nodes).parents_array(len(text_BC))
        return Drafted(Draft(tokens_BK, parents_BK, jnp.minimum(ctx.budget, self.nodes)), state, ctx.cache)

    def commit(self, params: Any, state: None, ctx: DraftContext, feedback: Feedback) -> None:
        return None


class Replay:
    """All texts as one batch on a target that writes them."""

    def __init__(self, folder: Path):
        ids = sorted({i for t in TEXTS for i in (*t["prompt_ids"], *t["text_ids"])})
        small = {i: n for n, i in enumerate(ids)}
        self.text = np.zeros((len(TEXTS), CAPACITY), np.int32)
        self.right = {name: np.zeros((len(TEXTS), CAPACITY), np.int32) for name in COSTS}
        self.prompts = []
        for b, t in enumerate(TEXTS):
            self.prompts.append(np.array([small[i] for i in t["prompt_ids"]], np.int32))
            whole = [small[i] for i in (*t["prompt_ids"], *t["text_ids"])]
            self.text[b, : len(whole)] = whole
            start = len(t["prompt_ids"])
            for name in COSTS:
                self.right[name][b, start : start + WRITTEN] = [int(n) for n in t[name]]
        model = tiny_model(folder, vocab=len(ids), capacity=CAPACITY, layers=1)
        self.model = dataclasses.replace(model, forward=functools.partial(write, text_BC=jnp.asarray(self.text)))
        self.by_default = functools.cache(lambda name: self.rounds(self.method(name)))

    def method(self, name: str) -> Method:
        """What `generate` decodes with under that name; the real draft models are not there, their drafts are."""
        if name in WITHOUT_MODEL:
            return resolve(MethodSpec(name), self.model)
        source = name.removeprefix("lookup_")
        policy = default_policy(policy_times(self.model, 4, None, share=COSTS[source][0]))
        drafter: Drafter = Recorded()
        if name != source:
            lookup = resolve(MethodSpec("prompt_lookup"), self.model).drafter
            assert lookup is not None
            drafter = Either(lookup, drafter)
        weights = (jnp.asarray(self.text), jnp.asarray(self.right[source]))
        return Method(drafter, get_verifier("greedy"), policy, lambda capacity: weights)

    def rounds(self, method: Method) -> np.ndarray:
        """int32[rounds, B]: tokens drafted in each round of each text, -1 after its end."""
        params = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
        session = Session(self.model, [Request(ids, params, seed=0) for ids in self.prompts], method)
        seen = [np.zeros((2, len(TEXTS)), np.int32)]
        while Finish.RUNNING in session.finish:
            session.advance(1)
            counters = session.state.counters
            seen.append(np.stack([np.asarray(counters.rounds), np.asarray(counters.drafted)]))
        for written, text, ids in zip(session.tokens(), self.text, self.prompts, strict=True):
            assert np.array_equal(written, text[len(ids) : len(ids) + WRITTEN])
        ran, drafted = np.moveaxis(np.diff(np.stack(seen), axis=0), 1, 0)
        return np.where(ran > 0, drafted, -1)

    def speeds(self, rounds: np.ndarray, v: tuple[float, ...], *, c: float = 0.0, keep: float = 0.0) -> np.ndarray:
        """Speed over plain decoding of each text: its tokens over the time of its rounds in plain steps."""
        time = np.asarray(v)[np.maximum(rounds, 0)] + ROUND + keep + c * rounds
        return WRITTEN / np.where(rounds >= 0, time, 0.0).sum(axis=0)


def write(params, tokens_Bn, cache: KVCache, *, n_valid_B=None, parents_Bn=None, want=None, text_BC):
    """A forward function whose most likely token is always the text's next one."""
    B, n = tokens_Bn.shape
    after_Bn = cache.length[:, None] + 1 + jnp.arange(n, dtype=jnp.int32)[None]
    next_Bn = jnp.take_along_axis(text_BC[:B], jnp.minimum(after_Bn, CAPACITY - 1), axis=1)
    return ForwardOut(jax.nn.one_hot(next_Bn, params.embedding.shape[0], dtype=jnp.float32)), cache


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """Nothing was measured before, so the policy guesses, as on a processor with AVX2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECSPARSE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(timing_cache.kernels, "status", lambda: {**STATUS, "isa": "avx2"})
        yield Replay(tmp_path_factory.mktemp("files"))


def of_tasks(speeds: np.ndarray, temperature: float) -> dict[str, float]:
    """Speed of each task: the mean of its texts."""
    return {
        task: float(np.mean([s for s, t in zip(speeds, TEXTS) if (t["task"], t["temperature"]) == (task, temperature)]))
        for task in TASKS
    }


@pytest.mark.parametrize("name", cells(WITHOUT_MODEL, ["prompt_lookup", "suffix"]))
def test_a_lookup_by_its_name_is_never_much_slower_than_plain_decoding(replay, name):
    rounds = replay.by_default(name)
    for machine, v in MACHINES.items():
        greedy, warm = (of_tasks(replay.speeds(rounds, v), t) for t in (0.0, 0.8))
        assert min(greedy.values()) >= 0.97 and min(warm.values()) >= 0.93, (machine, greedy, warm)


def test_a_processor_with_avx512_is_guessed_to_be_one(replay, monkeypatch):
    """Its rows are cheaper, so lookups gain more there than by the guess for AVX2."""
    by_avx2 = replay.speeds(replay.by_default("prompt_lookup"), MACHINES["avx512"])
    monkeypatch.setattr(timing_cache.kernels, "status", lambda: {**STATUS, "isa": "avx512"})
    here = replay.speeds(replay.rounds(replay.method("prompt_lookup")), MACHINES["avx512"])
    assert min(of_tasks(here, 0.0).values()) >= 0.97 and min(of_tasks(here, 0.8).values()) >= 0.93
    assert here.mean() > by_avx2.mean()


def test_what_repeats_itself_still_gains(replay):
    """The policy is not merely off."""
    for name, least in (("prompt_lookup", 1.2), ("suffix", 1.25)):
        found = of_tasks(replay.speeds(replay.by_default(name), MACHINES["avx2"]), 0.0)
        assert np.mean(list(found.values())) > least and found["summarise"] > 1.5, found


# A cheap drafter that repays and a dear one that does not; the slow ones differ in numbers, or draft with a lookup.
@pytest.mark.parametrize("name", cells([*COSTS, "lookup_head"], ["head", "layer_skip"]))
def test_a_drafter_with_a_model_is_never_much_slower_than_plain_decoding(replay, name):
    c, keep = COSTS[name.removeprefix("lookup_")]
    rounds = replay.by_default(name)
    for machine, v in MACHINES.items():
        for temperature in (0.0, 0.8):
            found = of_tasks(replay.speeds(rounds, v, c=c, keep=keep), temperature)
            assert min(found.values()) >= 0.93, (machine, temperature, found)


def test_in_a_batch_what_pays_is_what_pays_the_batch(replay):
    """Eight sequences fill a pass: a second row of each costs what twice eight rows cost more than eight."""
    together = resolve(MethodSpec("prompt_lookup"), replay.model, batch=8)
    rows = guessed_v("native", 40)
    v = tuple(t / rows[7] for t in rows[7::8])
    assert v[1] > 1.7  # nothing like a second row of one sequence
    alone, here = (replay.speeds(rounds, v) for rounds in (replay.by_default("prompt_lookup"), replay.rounds(together)))
    assert min(of_tasks(here, 0.8).values()) >= 0.93 > min(of_tasks(alone, 0.8).values())
    assert here.mean() > alone.mean()


def test_a_text_that_depends_on_its_drafts_is_drafted_in_a_batch_as_alone(replay):
    def policies(temperature: float, verifier: str) -> list[object]:
        sampling = SamplingParams(temperature=temperature)
        spec = MethodSpec("prompt_lookup", verifier, sampling=sampling)
        return [resolve(spec, replay.model, batch=b).policy for b in (1, 8)]

    for verifier in ("delta", "block"):
        alone, together = policies(0.8, verifier)
        assert alone == together
    for temperature, verifier in ((0.0, "greedy"), (0.8, "match")):
        alone, together = policies(temperature, verifier)
        assert alone.cost.v[1] < together.cost.v[1]


def test_what_reads_the_text_is_dear_behind_a_long_one(tmp_path):
    """A drafted token takes the part of a step's attention that its own layers have."""
    model, short = (specsparse.load(write_tiny_gguf(tmp_path / f"{n}.gguf", n_layers=n)) for n in (4, 1))
    drafters = {
        0.5: Choice("layer_skip", {"layers": [0, 3]}), 1.0: Choice("sparse_self"), 0.0: Choice("sparse_kv"),
        0.25: Choice("model", {"model": str(short.path)}),
    }  # fmt: skip
    for share, drafter in drafters.items():
        method = resolve(MethodSpec(drafter), model)
        cost = method.policy.cost
        assert method.kv_share == share and cost.kv > 0 and method.share > 0
        assert cost.kv_draft == pytest.approx(share * (cost.kv + cost.kv_row), rel=0.06)  # two digits


def test_what_generate_drafted_before_is_told_from_what_pays(replay):
    """Ten tokens a round after a match of one, as in the original: slower than plain decoding on most tasks."""
    method = Method(get_drafter("prompt_lookup", gamma=10, ngram_min=1), get_verifier("greedy"))
    found = of_tasks(replay.speeds(replay.rounds(method), MACHINES["older kernels"]), 0.0)
    assert found["chat"] < 0.8 and sum(speed < 0.97 for speed in found.values()) > 4, found
