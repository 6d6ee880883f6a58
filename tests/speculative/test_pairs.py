"""Names, options, and the table of draws."""

import dataclasses

import pytest

from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.method import MethodSpec, UnfitPair, resolve
from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.verifiers import VERIFIERS, get_verifier, valid_verifiers
from specsparse.speculative.verifiers.draft_rules import Match
from specsparse.speculative.verifiers.rejection import Rejection


@dataclasses.dataclass(frozen=True)
class Stub(Drafter):
    drawn: DraftKind
    branching: bool

    kind = property(lambda self: self.drawn)
    tree = property(lambda self: self.branching)
    max_nodes = property(lambda self: 4)
    max_depth = property(lambda self: 2)

    def init(self, params, ctx, *, hidden=None):
        raise NotImplementedError

    def draft(self, params, state, ctx):
        raise NotImplementedError

    def commit(self, params, state, ctx, feedback):
        raise NotImplementedError


TABLE = [
    (DraftKind.ONE_HOT, False, {"greedy", "match", "tree_greedy", "tree_match", "delta", "tree_delta", "block"}),
    (DraftKind.ONE_HOT, True, {"tree_greedy", "tree_match", "tree_delta"}),
    (DraftKind.SAMPLED, False, {"match", "token", "block"}),
    (DraftKind.IID, True, {"tree_match", "mss", "kseq"}),
    (DraftKind.WOR, True, {"tree_match", "wor"}),
]


@pytest.mark.parametrize(("kind", "tree", "lossless"), TABLE)
def test_table_of_draws(kind, tree, lossless):
    valid = valid_verifiers(kind, tree=tree)
    assert set(valid) == lossless | {"typical", "threshold"}
    assert valid[-2:] == ["typical", "threshold"]  # lossy ones come last


@pytest.mark.parametrize(("kind", "tree", "lossless"), TABLE)
def test_pairs_outside_the_table_are_refused_with_the_valid_names(kind, tree, lossless):
    for name, verifier in VERIFIERS.items():
        if name in lossless | {"typical", "threshold"}:
            assert resolve(MethodSpec(Stub(kind, tree), verifier)).verifier is verifier
            continue
        if tree and verifier.on_trees in lossless:
            assert resolve(MethodSpec(Stub(kind, tree), name)).verifier is VERIFIERS[verifier.on_trees]
            continue
        with pytest.raises(UnfitPair, match=name) as refused:
            resolve(MethodSpec(Stub(kind, tree), name))
        assert refused.value.kind is kind
        assert all(valid in str(refused.value) for valid in lossless)


def test_greedy_is_refused_above_temperature_zero():
    drafter = Stub(DraftKind.ONE_HOT, False)
    assert resolve(MethodSpec(drafter, "greedy")).verifier.name == "greedy"
    with pytest.raises(UnfitPair, match=r"temperature 0\.8.*match"):
        resolve(MethodSpec(drafter, "greedy", sampling=SamplingParams(temperature=0.8)))


def test_four_functions_do_the_lossless_work():
    assert len({type(v.rule) for v in VERIFIERS.values() if v.lossless}) == 4
    for name in ("greedy", "match", "tree_greedy", "tree_match"):
        assert VERIFIERS[name].rule == Match()
        assert not VERIFIERS[name].needs_p
    # Width-one aliases are the very same rule, hence the same bits.
    for name in ("token", "mss", "wor", "delta", "tree_delta"):
        assert VERIFIERS[name].rule == Rejection()


def test_options():
    assert get_verifier("typical", epsilon=0.2).rule.epsilon == 0.2
    assert get_verifier("threshold", total=0.5, single=0.9).rule.total == 0.5
    assert get_verifier("token") is VERIFIERS["token"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tokens", {}, r"unknown; did you mean token\?"),
        ("token", {"epsilon": 0.1}, "no option of token; valid: none"),
        ("typical", {"total": 0.1}, "no option of typical; valid: delta, epsilon"),
        ("typical", {"epsilon": 0.0}, "must be a number above 0 and at most 1"),
        ("threshold", {"total": float("nan")}, "must be a number above 0 and at most 1"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(UserError, match=message):
        get_verifier(name, **options)
