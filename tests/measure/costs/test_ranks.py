"""Measured acceptance, of chains and by rank, and what policies and trees make of it."""

import dataclasses
import os

import pytest

import specsparse
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.experiments import configured
from specsparse.experiments.command_line import PARTS, completed
from specsparse.experiments.kinds import compare
from specsparse.experiments.kinds.compare import CompareSpec
from specsparse.measure.costs import acceptance, measuring
from specsparse.runtime import timing_cache
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.runtime.timing_cache import FREE, CostTable, DraftCost, cost_key
from specsparse.speculative.drafters.heads import head as heads
from specsparse.speculative.drafters.synthetic import Scripted
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.static import StaticTree
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from tests.experiments.playing import replaced, run_config, settings

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "tiny.gguf"
    return specsparse.load(write_tiny_gguf(path, quant="Q4_0", n_layers=2, context_length=512))


@pytest.fixture
def table(model, monkeypatch, tmp_path):
    """A kept table in which v(n) is 1 for every n, drafting is free, and a level costs nothing."""
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path))
    flat = CostTable((1, 2), 16, (1e-3, 1e-3), 0.0, 0.0, 1e-3, 0.0, 0.0, 0.0, 1e9, None, 1e9)
    monkeypatch.setattr(measuring, "measure", lambda *_, **__: flat)
    return flat


def test_acceptance_of_a_chain_is_accepted_over_tested(model, table):
    truth = specsparse.generate(model, PROMPT, max_tokens=200, ignore_eos=True).token_ids
    drafter = Scripted.chain(3, (1,), vocab_size=model.config.vocab_size, truth=(*PROMPT, *truth))
    method = resolve(MethodSpec(drafter, "match"), model)
    found = acceptance.table_with_acceptance(model, "scripted", lambda: method, [PROMPT], GREEDY)
    assert found.acceptance == {"scripted": (0.5,)}  # one right, then one wrong, every round


def test_the_child_of_rank_zero_of_a_perfect_draft_is_always_accepted(model):
    """All of the target's layers: rank 0 is the target's own token. With all but one layer other ranks have a share."""

    def rates(layers):
        drafter, tree = Choice("layer_skip", {"layers": layers}), StaticTree(acceptance.FAN)
        method = resolve(MethodSpec(drafter, policy=Fixed(8), tree=tree), model)
        return acceptance.by_rank(model, method, [PROMPT, PROMPT[:6]], GREEDY)

    assert rates([0, 1]) == (1.0,) + (0.0,) * 7
    part = rates([0])
    assert len(part) == acceptance.RANKS and 0 < sum(part) <= 1 and part[0] < 1


def test_acceptance_is_measured_once_and_survives_the_file(model, table):
    method = resolve(MethodSpec("prompt_lookup", policy=Fixed(3)), model)
    key = acceptance.acceptance_key("prompt_lookup", "greedy", GREEDY, "chain")
    found = acceptance.table_with_acceptance(model, key, lambda: method, [PROMPT], GREEDY)
    assert 0 <= found.acceptance[key][0] <= 1
    again = acceptance.table_with_acceptance(model, key, pytest.fail, [PROMPT], GREEDY)
    assert again == found == timing_cache.load(model)


def test_the_key_names_what_changes_acceptance():
    warm = SamplingParams(temperature=0.8, top_p=0.9)
    keys = {
        acceptance.acceptance_key("a", verifier, params, shape)
        for verifier in ("match", None)
        for params in (GREEDY, warm, warm.merged(top_p=1.0))
        for shape in ("chain", "top siblings")
    }
    assert len(keys) == 12


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"logit_bias": {3: -1.0}},
        {"logit_bias": {3: -2.0}}, {"allowed_token_ids": list(range(99))}, {"allowed_token_ids": list(range(98))},
        {"bad_words": ["a"]}, {"min_tokens": 2}, {"logits_processors": [len]},
    ],
)  # fmt: skip
def test_the_key_names_every_parameter_of_the_distribution(more):
    seen = {acceptance.acceptance_key("a", None, params, "chain") for params in (GREEDY, GREEDY.merged(**more))}
    assert len(seen) == 2 and max(map(len, seen)) < 120
    same = GREEDY.merged(max_tokens=7, seed=3, logprobs=1)
    assert acceptance.acceptance_key("a", None, same, "chain") in seen


def test_the_key_names_the_verifier_s_options():
    strict, lax = {"epsilon": 0.2, "delta": None}, {"epsilon": 0.5, "delta": None}
    keys = {acceptance.acceptance_key("a", "typical", GREEDY, "chain", options=o) for o in (None, strict, lax)}
    assert len(keys) == 3 and "a, typical (epsilon=0.5), chain, temperature=0.0" in keys


def test_an_option_at_its_default_is_as_good_as_none():
    """A drafter by its name finds what a config measured, which spells all options out."""
    choices = {"drafter": ("prompt_lookup", "layer_skip"), "tree": ("sequoia",), "verifier": ("typical",)}
    for group, name in ((group, name) for group, names in choices.items() for name in names):
        spelled = {key: value for key, value in completed(group, {"name": name}).items() if key != "name"}
        assert cost_key(name, spelled, among=PARTS[group]) == cost_key(name, among=PARTS[group]) == name
    assert cost_key("prompt_lookup", {"ngram_max": 5}) == "prompt_lookup (ngram_max=5)"
    assert cost_key("mine:Echo", {"times": 1}).startswith("mine:Echo (times=1")


def test_another_file_of_the_same_name_is_another_drafter(tmp_path, monkeypatch):
    """A draft model, a head and a list of ids that were written anew; the heads of a newer package."""
    file = tmp_path / "x.gguf"
    cases = (("model", "model"), ("draft_model", "model"), ("head", "head"), ("layer_skip", "draft_vocab"))
    seen = set()
    for content in ("1", "1 2"):
        file.write_text(content)
        seen |= {cost_key(name, {option: str(file)}) for name, option in cases}
    assert len(seen) == 2 * len(cases) and all(f"={file} #" in key for key in seen)
    os.utime(file, ns=(1, 1))
    assert cost_key("head", {"head": file}) not in seen
    monkeypatch.setattr(heads, "SHIPPED", tmp_path)
    own = {cost_key(name, {"head": None}) for name in ("head", "lookup_head", "eagle")}
    file.write_text("")
    assert len(own | {cost_key("head")}) == 4 and cost_key("model") == "model"
    with pytest.raises(UserError, match="no such file"):
        cost_key("model", {"model": "/no/such.gguf"})


@pytest.fixture
def cfg(model):
    tree = Choice("sequoia", {"acceptance": None, "cost": None, "level_cost": None, "nodes": 6, "depth": 6})
    method = {"drafter": "layer_skip", "options": {"layers": [0]}, "verifier": "tree_greedy", "gamma": 15}
    return run_config(model.path, **method, sampling={"temperature": 0.0}, chat=False, tree=tree)


def found(cfg, model):
    return configured.filled(cfg, model, measuring.silent)


def shape(cfg):
    return get_tree(cfg.tree.name, **cfg.tree.options)


def keep(model, table, cfg, rates, draft=FREE):
    """The table with acceptance by rank and the cost of a tree's level."""
    key = acceptance.acceptance_key("layer_skip (layers=[0])", "tree_greedy", GREEDY, "top siblings")
    table = dataclasses.replace(table, acceptance={key: rates})
    timing_cache.save(model, table.with_draft("layer_skip (layers=[0]), top trees", draft))


def test_sequoia_follows_what_was_measured(model, table, cfg):
    """Sure first ranks make a chain; equal ranks a bush; a level as dear as a step one level."""
    keep(model, table, cfg, (0.9, 0.05))
    assert shape(found(cfg, model)).template.max_depth == 6
    keep(model, table, cfg, (0.2,) * 5)
    assert shape(found(cfg, model)).template.width > 2
    keep(model, table, cfg, (0.3, 0.1), DraftCost(token_s=table.plain_s))
    assert shape(found(cfg, model)).template.max_depth == 1


@pytest.mark.slow  # its parts are measured one by one here and in test_measure.py
def test_sequoia_measures_what_is_not_kept(model, table, cfg):
    tree = found(cfg, model).tree.options
    assert len(tree["acceptance"]) == acceptance.RANKS and len(tree["cost"]) == 7
    assert tree["cost"] == sorted(tree["cost"]) and tree["level_cost"] >= 0
    assert timing_cache.load(model).acceptance and timing_cache.load(model).drafts


def test_policies_read_the_measured_acceptance(model, table, cfg):
    policy = Choice("cost", {"gamma": 3, "v": None, "prior": None})
    method = {"drafter": Choice("prompt_lookup"), "verifier": Choice("greedy"), "policy": policy}
    cfg = replaced(cfg, **method, tree=Choice("chain"))
    key = acceptance.acceptance_key("prompt_lookup", "greedy", GREEDY, "chain")
    kept = dataclasses.replace(table, acceptance={key: (0.37,)})
    timing_cache.save(model, kept.with_draft("prompt_lookup", DraftCost(token_s=table.plain_s / 2)))
    policy = resolve(found(cfg, model).spec).policy
    assert policy.cost.prior == 0.37 and policy.cost.c == 0.5 and policy.cost.v == (1.0,) * 4
    fixed = replaced(cfg, policy=Choice("fixed", {"gamma": 3}))
    assert found(fixed, model) is fixed


def test_compare_reads_the_cost_of_each_drafter(model, table, cfg):
    pairs = CompareSpec(("prompt_lookup", "suffix"), ("greedy",))
    policy = Choice("cost", {"gamma": 3, "v": None, "prior": 0.5})
    cfg = settings(replaced(cfg, kind="compare", compare=pairs, tree=Choice("chain"), policy=policy))
    for name, cost in (("prompt_lookup", 0.25), ("suffix", 0.75)):
        key = cost_key(name, configured.drafter_choice(cfg, name).options)  # as `roofline` keeps it
        table = table.with_draft(key, DraftCost(token_s=cost * table.plain_s))
    timing_cache.save(model, table)
    methods = [resolve(found(pair, model).spec) for pair in compare.pairs(cfg)[0].values()]
    assert [method.policy.cost.c for method in methods] == [0.25, 0.75]
