"""The rules of verification, and the verifiers by name: which rule each is, what drafts it is sound for, and what it
promises. Importing this costs no jax.

Four rules do all the lossless work (match, sibling rejection, kseq, block); the names of the literature are these rules
on the draws they are sound for.

Everything that decides (acceptance probabilities, residual distributions) is written once for numpy and jax.numpy: the
engine runs it in float32 inside the jit, the certificate in float64 with exact weights instead of coins.
"""

from collections.abc import Mapping

from specsparse.speculative.base import DraftKind, Verifier
from specsparse.support.registry import Registry

SYNTHETIC = "synthetic"
"""Label of runs whose acceptance is made up. It has no distribution, and is made with a drafter (`runtime.method`)."""

_ONE_HOT, _SAMPLED, _IID, _WOR = (frozenset({k}) for k in DraftKind)
_ANY = frozenset(DraftKind)

BUILTIN: Mapping[str, Verifier] = {v.name: v for v in (
    Verifier("greedy", "draft_rules:Match", _ONE_HOT, needs_p=False, greedy_only=True),
    Verifier("match", "draft_rules:Match", _ONE_HOT | _SAMPLED, needs_p=False),
    Verifier(
        "tree_greedy", "draft_rules:Match", _ONE_HOT, tree=True, needs_p=False, greedy_only=True, paper="2305.09781"
    ),
    Verifier("tree_match", "draft_rules:Match", _ONE_HOT | _IID | _WOR, tree=True, needs_p=False, paper="2305.09781"),
    Verifier("token", "rejection:Rejection", _SAMPLED, paper="2211.17192"),
    Verifier("mss", "rejection:Rejection", _IID, tree=True, paper="2305.09781"),
    Verifier("wor", "rejection:Rejection", _WOR, tree=True, paper="2402.12374"),
    Verifier("delta", "rejection:Rejection", _ONE_HOT, paper="2401.15077"),
    Verifier("tree_delta", "rejection:Rejection", _ONE_HOT, tree=True, paper="2401.15077"),
    Verifier("kseq", "sibling_rules:KSeq", _IID, tree=True, paper="2310.15141"),
    Verifier("block", "draft_rules:Block", _ONE_HOT | _SAMPLED, paper="2403.10444"),
    Verifier("typical", "sibling_rules:Typical", _ANY, tree=True, lossless=False, paper="2401.10774"),
    Verifier("threshold", "sibling_rules:Threshold", _ANY, tree=True, lossless=False),
)}  # fmt: skip
"""All verifiers that have a distribution, by name; the rule of each is its home here, and is not made yet."""

RULES: Registry[object] = Registry(
    "verifier",
    "specsparse.speculative.verifiers.siblings:SiblingRule",
    "specsparse.speculative",
    {name: f"verifiers.{verifier.rule}" for name, verifier in BUILTIN.items()}
    | {SYNTHETIC: "drafters.synthetic:SyntheticRates"},
)
"""The rule of each verifier; its fields are the options. One's own is a `SiblingRule` with `kinds`, or a `Verifier`."""


def same_text(name: str) -> bool:
    """Whether that verifier promises plain decoding's tokens, bit for bit; others keep the distribution at most."""
    return name in BUILTIN and BUILTIN[name].lossless and not BUILTIN[name].needs_p
