"""Verifiers of other libraries: vLLM's from its definition, transformers' and llama.cpp's where they are installed."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.speculative.base import DraftKind
from specsparse.speculative.proof.cases import make_case
from specsparse.speculative.proof.exact import continuations, total_variation
from specsparse.speculative.proof.libraries import (
    LIBRARY_HEAD,
    Library,
    library_row,
    llama_cpp_match,
    table,
    transformers_sampling,
    vllm_greedy,
    vllm_random,
)
from specsparse.speculative.proof.measured import measure_external, round_probs, sampled_probs
from specsparse.speculative.proof.results import driver_tv, power
from specsparse.speculative.trees.template import TreeTemplate

ONE = TreeTemplate.chain(1)
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="transformers and torch are optional",
)
needs_llama = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is optional")


def case(corner="random", kind=DraftKind.SAMPLED):
    return make_case(corner, kind, ONE, vocab=3, seed=0)


@pytest.mark.parametrize(
    "how", [vllm_random(uniforms=True), vllm_random(uniforms=True, draft_probs=False), vllm_greedy()]
)
def test_vllm_exactly(how):
    assert all(r.holds for r in measure_external(how, vocab=3, gamma=2, seed=0))


@pytest.mark.parametrize("draft_probs", [True, False])
def test_vllm_with_its_noise(draft_probs):
    how = dataclasses.replace(vllm_random(draft_probs=draft_probs), samples=100_000)
    results = measure_external(how, vocab=3, gamma=2, seed=0)
    assert all(r.holds and r.power.finds < 0.02 for r in results)


@needs_torch
def test_transformers_as_installed():
    how, c = transformers_sampling(), case("truncated differently")
    probs, _ = round_probs(how, [c], seed=0)[0]
    assert total_variation(probs, continuations(c.p, 2)[0]) <= 2 * driver_tv(ONE, vocab=3)
    lossy, _ = round_probs(transformers_sampling(ensemble=0.5), [c], seed=0)[0]
    assert total_variation(lossy, continuations(c.p, 2)[0]) > 0.01


@needs_torch
def test_transformers_keeps_its_torch():
    import torch
    from transformers.generation import utils

    how = transformers_sampling()
    p, q = np.full((2, 3), 1 / 3), np.full((1, 3), 1 / 3)
    first = how.tokens(p, q, np.array([1]), np.array([0.0, 0, 0.5]))
    assert utils.torch is torch and first.tolist() == [1, 1]


@needs_torch
@pytest.mark.slow
def test_transformers_with_its_own_draws():
    how = dataclasses.replace(transformers_sampling(uniforms=False), samples=3000)
    assert all(r.holds for r in measure_external(how, vocab=3, gamma=2, seed=0))


@needs_llama
def test_llama_cpp_samples_and_matches():
    for top_k in (0, 2):
        how = dataclasses.replace(llama_cpp_match(top_k=top_k), samples=3000)
        c = make_case("random", DraftKind.SAMPLED, TreeTemplate.chain(3), vocab=3, seed=0)
        probs = sampled_probs(how, dataclasses.replace(c, template=TreeTemplate.chain(2)), 2, seed=0)
        keeps = c.p if how.target_transform is None else [np.apply_along_axis(how.target_transform, -1, t) for t in c.p]
        target = continuations(keeps, 2)[0]
        can = power(target, 3000, cases=1)
        assert total_variation(probs, target) <= can.bound < can.finds < 0.12


def test_the_example_in_torch_has_the_shapes_of_vllm(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "experiments")
    how = importlib.import_module("certify_vllm_shapes").VERIFIER
    results = measure_external(dataclasses.replace(how, samples=1000), vocab=2, gamma=2, seed=0)
    assert all(r.holds for r in results) and max(r.bound for r in results) < 1e-4


def test_what_is_not_installed_is_one_line(monkeypatch):
    for name in ("transformers.generation", "transformers", "llama_cpp"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"transformers .* and torch are needed"):
        transformers_sampling()
    with pytest.raises(UserError, match="llama-cpp-python is needed"):
        llama_cpp_match()


def test_a_row_of_the_page():
    how = vllm_greedy()
    results = measure_external(how, vocab=2, gamma=1, seed=0)
    row = library_row(Library(vllm_greedy, "", "argmax"), how, results, "2026-11-23")
    assert len(row) == len(LIBRARY_HEAD) and row[2].endswith("2026-11-23") and row[-1] == "yes"
    wrong = [dataclasses.replace(r, tv=1.0) for r in results]
    assert library_row(Library(vllm_greedy, "", ""), how, wrong, "")[-1] == "**NO**"
    assert library_row(Library(vllm_greedy, "", ""), dataclasses.replace(how, lossless=False), wrong, "")[-1].endswith(
        "no"
    )
    assert table(("a", "b"), [("1", "2")]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]
