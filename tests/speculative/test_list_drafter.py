"""`ListDrafter`: drafters in plain Python, their contract, figures and mistakes."""

import dataclasses
import importlib
import itertools
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import ListDrafter, run
from specsparse.cli.main import main
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import GenerationFailed, UserError
from specsparse.speculative.base import Draft, Drafted, Drafter, DraftKind
from specsparse.speculative.drafters.lookup import Either, PromptLookup
from specsparse.support.options import options_of
from specsparse.testing import check_drafter, draft_context, write_tiny_gguf

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return specsparse.load(write_tiny_gguf(path, quant="Q8_0", tokenizer="spm", n_layers=1, context_length=512))


@pytest.fixture(scope="module")
def most_frequent():
    sys.path.insert(0, str(NOTEBOOKS))
    yield importlib.import_module("most_frequent").MostFrequent
    sys.path.remove(str(NOTEBOOKS))


class Bad(ListDrafter):
    """Breaks its promise once the text has more than twelve tokens, as `how` says: one program for all mistakes."""

    how = "nothing"

    def propose(self, tokens, limit):
        return [] if len(tokens) <= 12 else MISTAKES[Bad.how][0](limit)


MISTAKES = {
    "nothing": (lambda limit: None, "returned None: return a list of at most 4 ids, 0 to 299"),
    "outside": (lambda limit: [5, 300], "returned [5, 300]: return a list of at most 4 ids, 0 to 299"),
    "negative": (lambda limit: [-1], "returned [-1]: return"),
    "many": (lambda limit: [1] * (limit + 1), "returned [1, 1, 1, 1, 1]: return a list of at most 4 ids"),
    "text": (lambda limit: "and", "returned and: return"),
    "unordered": (lambda limit: {2}, "returned {2}: return"),
    "raises": (lambda limit: 1 // (limit - limit), "raised ZeroDivisionError: integer division or"),
    "later": (lambda limit: (1 // 0 for _ in [1]), "raised ZeroDivisionError: integer division or"),
    "leaves": (lambda limit: sys.exit(3), "raised SystemExit: 3"),
    "endless": (lambda limit: itertools.repeat(1), "returned repeat(1): return a list of at most 4 ids"),
}


def test_it_keeps_the_contract_and_says_what_broke_it(most_frequent):
    assert len(check_drafter(most_frequent()).lines) == 8
    with pytest.raises(AssertionError, match=r"Bad\.propose returned None: return a list of at most 4 ids, 0 to 4"):
        check_drafter(Bad())


@pytest.mark.parametrize(("loop", "temperature"), [("jit", 0.0), ("host", 0.7)])
def test_the_text_is_plain_decodings_and_the_drafts_time_is_known(model, most_frequent, loop, temperature):
    sampling = SamplingParams(temperature=temperature, max_tokens=20)
    plain = specsparse.generate(model, PROMPT, sampling=sampling, seed=3)
    ours = {"drafter": "most_frequent:MostFrequent", "verifier": "match", "policy": "fixed", "loop": loop}
    mine = specsparse.generate(model, PROMPT, sampling=sampling, seed=3, **ours)
    counters = mine.stats.counters
    assert mine.token_ids == plain.token_ids and counters.num_draft_tokens > 0
    assert loop == "jit" or 0 < counters.times.draft < counters.times.total


@pytest.mark.parametrize("pair", [(Bad(), PromptLookup()), (PromptLookup(), Bad())])
def test_one_that_breaks_beside_another_is_said(pair, monkeypatch):
    monkeypatch.setattr(Bad, "how", "raises")
    texts, either = [[*range(13)], [*range(5)]], Either(*pair)
    ctx = draft_context(texts, capacity=32, budget=2)
    drafted = either.draft(None, either.init(None, ctx), ctx)
    assert drafted.failed.tolist() == [True, False] and drafted.failed.dtype == bool
    assert "Bad.propose raised ZeroDivisionError" in either.failure(np.array(texts[0], np.int32))
    assert either.failure(np.array(texts[1], np.int32)) is None


def test_limits_are_those_of_the_policy_and_attributes_are_options(model):
    seen = []

    class Same(ListDrafter):
        max_nodes = 3
        back: int = 2

        def propose(self, tokens, limit):
            seen.append((len(tokens), limit))
            return (tokens[-self.back :] * limit)[:limit]

    decorated = dataclasses.dataclass(frozen=True)(type("Own", (Same,), {"__annotations__": {"more": int}, "more": 1}))
    assert decorated(more=4).more == 4 and decorated().max_nodes == 3
    assert Same() == Same(3, 2) != Same(back=1) and hash(Same()) == hash(Same(3)) and Same(5).max_nodes == 5
    assert [*options_of(Same)] == ["max_nodes", "back"] and options_of(Same)["max_nodes"].aliases[0] == "gamma"
    specsparse.generate(model, [PROMPT, PROMPT[:5]], max_tokens=6, drafter=Same(), verifier="greedy")
    assert {limit for _, limit in seen} <= {1, 2, 3} and {n for n, _ in seen} >= {5, 8}
    assert all(n + limit <= 8 + 6 for n, limit in seen)  # room for the token that every round adds


@pytest.mark.parametrize("how", MISTAKES)
def test_mistakes_are_one_line_with_the_text_so_far(model, how, monkeypatch):
    monkeypatch.setattr(Bad, "how", how)
    plain = specsparse.generate(model, PROMPT, max_tokens=5)
    for loop in ("jit", "host") if how == "raises" else ("jit",):
        with pytest.raises(GenerationFailed) as error:
            specsparse.generate(model, PROMPT, max_tokens=20, drafter=Bad(), verifier="greedy", loop=loop)
        assert str(error.value).startswith(f"Bad.propose {MISTAKES[how][1]}") and "\n" not in str(error.value)
        assert error.value.text == plain.text and (how != "raises" or __file__ in str(error.value))


def test_of_a_batch_the_text_of_the_failed_one_is_given(model):
    batch = [PROMPT[:2], PROMPT]
    alone = specsparse.generate(model, PROMPT, max_tokens=5)
    with pytest.raises(GenerationFailed) as error:
        specsparse.generate(model, batch, max_tokens=8, drafter=Bad(), verifier="greedy")
    assert error.value.text == alone.text
    assert len(specsparse.generate(model, batch, max_tokens=4, drafter=Bad(), verifier="greedy")) == 2


def test_the_commands_print_the_text_and_the_line(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text(
        "from specsparse import ListDrafter\n\n\nclass Broken(ListDrafter):\n"
        "    def propose(self, tokens, limit):\n        return None if len(tokens) > 20 else []\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    prompt = "hello world hello world"
    text = specsparse.generate(model, prompt, max_tokens=30).text
    line = re.compile(r"specsparse: Broken\.propose returned None: return a list of at most \d ids, 0 to 299\n")
    command = ["generate", str(model.path), prompt, "--drafter", "broken:Broken", "--max-tokens", "30"]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out.strip() and text.startswith(out.rstrip("\n")) and line.fullmatch(err)
    options = ["drafter=broken:Broken", "max_tokens=8", "data.tasks=[code]", "data.chat=false", "data.limit_per_task=1"]
    with pytest.raises(SystemExit, match="2"):
        run.main([f"model={model.path}", *options, "time_split=0", "hydra.run.dir=out"])
    said = capsys.readouterr().err
    assert line.fullmatch(said.splitlines(keepends=True)[-1]) and "Traceback" not in said


class Uniform(Drafter):
    """Draws one token from all of the vocabulary, whose size it knows while it is traced."""

    kind, max_nodes = DraftKind.SAMPLED, 1

    def draft(self, params, state, ctx):
        batch = ctx.length.shape[0]
        tokens = jnp.minimum(ctx.seed[:, :1] % ctx.vocab, ctx.vocab - 1).astype(jnp.int32)
        q = jnp.full((batch, 1, ctx.vocab), 1 / ctx.vocab, jnp.float32)
        draft = Draft(tokens, jnp.full((batch, 1), -1, jnp.int32), jnp.minimum(ctx.budget, 1), q)
        return Drafted(draft, state, ctx.cache)


def test_the_vocabulary_is_a_static_number(model):
    warm = SamplingParams(temperature=0.9, max_tokens=6)
    found = specsparse.generate(model, PROMPT, sampling=warm, seed=1, drafter=Uniform(), verifier="token")
    assert found.stats.counters.num_draft_tokens > 0


def test_a_torch_module_drafts(model, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(NOTEBOOKS)
    made = importlib.import_module("torch_draft").TorchDraft
    monkeypatch.setattr(made, "module", torch.nn.Sequential(torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300)))
    plain = specsparse.generate(model, PROMPT, max_tokens=12)
    mine = specsparse.generate(model, PROMPT, max_tokens=12, drafter=made(), verifier="greedy")
    assert mine.token_ids == plain.token_ids and mine.stats.counters.num_draft_tokens > 0


@pytest.mark.parametrize("nodes", [0, 10**9, "x"])
def test_the_room_of_a_drafter_that_is_made_is_bounded(model, nodes):
    with pytest.raises(UserError, match=r"Bad\.max_nodes=.* must be a whole number from 1 to 4096"):
        specsparse.generate(model, PROMPT, drafter=Bad(max_nodes=nodes), max_tokens=2)
