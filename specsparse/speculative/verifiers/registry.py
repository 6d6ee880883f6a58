"""Verifiers by name: which rule each is, what drafts it is sound for, and what it promises. Imports no jax.

Four rules do all the lossless work (match, sibling rejection, kseq, block); the names of the literature are these rules
on the draws they are sound for.
"""

from collections.abc import Mapping
from typing import NamedTuple

from specsparse.speculative.base import DraftKind, Verifier
from specsparse.speculative.verifiers.options import Acceptance, NoOptions, ThresholdOptions, TypicalOptions
from specsparse.support.registry import Registry

SYNTHETIC = "synthetic"
"""Label of runs whose acceptance is made up. It has no law, and is made with a drafter (`method.choose_verifier`)."""


class Facts(NamedTuple):
    """What is known of a verifier before it is made; see `base.Verifier`, and `rule`, the home of its rule."""

    rule: str
    kinds: frozenset[DraftKind]
    tree: bool = False
    lossless: bool = True
    needs_p: bool = True
    greedy_only: bool = False
    paper: str = ""


_ONE_HOT, _SAMPLED, _IID, _WOR = (frozenset({k}) for k in DraftKind)
_ANY = frozenset(DraftKind)

FACTS: Mapping[str, Facts] = {
    "greedy": Facts("match:Match", _ONE_HOT, needs_p=False, greedy_only=True),
    "match": Facts("match:Match", _ONE_HOT | _SAMPLED, needs_p=False),
    "tree_greedy": Facts("match:Match", _ONE_HOT, tree=True, needs_p=False, greedy_only=True, paper="2305.09781"),
    "tree_match": Facts("match:Match", _ONE_HOT | _IID | _WOR, tree=True, needs_p=False, paper="2305.09781"),
    "token": Facts("rejection:Rejection", _SAMPLED, paper="2211.17192"),
    "mss": Facts("rejection:Rejection", _IID, tree=True, paper="2305.09781"),
    "wor": Facts("rejection:Rejection", _WOR, tree=True, paper="2402.12374"),
    "delta": Facts("rejection:Rejection", _ONE_HOT, paper="2401.15077"),
    "tree_delta": Facts("rejection:Rejection", _ONE_HOT, tree=True, paper="2401.15077"),
    "kseq": Facts("kseq:KSeq", _IID, tree=True, paper="2310.15141"),
    "block": Facts("block:Block", _ONE_HOT | _SAMPLED, paper="2403.10444"),
    "typical": Facts("lossy:Typical", _ANY, tree=True, lossless=False, paper="2401.10774"),
    "threshold": Facts("lossy:Threshold", _ANY, tree=True, lossless=False),
}
"""Of all verifiers that have a law, by name."""

_OWN = {"typical": TypicalOptions, "threshold": ThresholdOptions, SYNTHETIC: Acceptance}

RULES: Registry[object] = Registry(
    "verifier",
    "specsparse.speculative.verifiers.siblings:SiblingRule",
    {name: f"specsparse.speculative.verifiers.{facts.rule}" for name, facts in FACTS.items()}
    | {SYNTHETIC: "specsparse.speculative.drafters.synthetic:SyntheticRates.of"},
    options={name: _OWN.get(name, NoOptions) for name in (*FACTS, SYNTHETIC)},
)
"""The rule of each verifier, with its options. One's own is a `SiblingRule` that says its `kinds`, or a `Verifier`."""


def same_text(name: str) -> bool:
    """Whether that verifier promises plain decoding's tokens, bit for bit; others keep the law at most."""
    return name in FACTS and FACTS[name].lossless and not FACTS[name].needs_p


def verifier_of(name: str, rule: object, facts: Facts) -> Verifier:
    """The verifier of that name, made of a rule."""
    about = facts._asdict()
    del about["rule"]
    return Verifier(name, rule, **about)
