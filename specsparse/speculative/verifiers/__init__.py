"""The rules of verification, and the verifiers by name: which rule each is, what drafts it is sound for, and what it
promises. Importing this costs no jax.

Four rules do all the lossless work (match, sibling rejection, kseq, block); the names of the literature are these rules
on the draws they are sound for.

Everything that decides (acceptance probabilities, residual distributions) is written once for numpy and jax.numpy: the
engine runs it in float32 inside the jit, the certificate in float64 with exact weights instead of coins.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from specsparse.errors import UserError
from specsparse.speculative.base import DraftKind, Verifier
from specsparse.support.options import read
from specsparse.support.registry import Registry

SYNTHETIC = "synthetic"
"""Label of runs whose acceptance is made up. It has no distribution, and is made with a drafter (`runtime.method`)."""

_ONE_HOT, _SAMPLED, _IID, _WOR = (frozenset({k}) for k in DraftKind)
_ANY = frozenset(DraftKind)


def _builtin(name: str, home: Any, kinds: frozenset[DraftKind], **facts: Any) -> Verifier:
    """A built-in verifier with the home of its rule, which is not made yet, in the rule's place."""
    return Verifier(name, home, kinds, **facts)


BUILTIN: Mapping[str, Verifier] = {v.name: v for v in (
    _builtin("greedy", "draft_rules:Match", _ONE_HOT, needs_p=False, greedy_only=True, on_trees="tree_greedy"),
    _builtin("match", "draft_rules:Match", _ONE_HOT | _SAMPLED, needs_p=False, on_trees="tree_match"),
    _builtin(
        "tree_greedy", "draft_rules:Match", _ONE_HOT, tree=True, needs_p=False, greedy_only=True, paper="2305.09781"
    ),
    _builtin("tree_match", "draft_rules:Match", _ONE_HOT | _IID | _WOR, tree=True, needs_p=False, paper="2305.09781"),
    _builtin("token", "rejection:Rejection", _SAMPLED, paper="2211.17192"),
    _builtin("mss", "rejection:Rejection", _IID, tree=True, paper="2305.09781"),
    _builtin("wor", "rejection:Rejection", _WOR, tree=True, paper="2402.12374"),
    _builtin("delta", "rejection:Rejection", _ONE_HOT, on_trees="tree_delta", paper="2401.15077"),
    _builtin("tree_delta", "rejection:Rejection", _ONE_HOT, tree=True, paper="2401.15077"),
    _builtin("kseq", "sibling_rules:KSeq", _IID, tree=True, paper="2310.15141"),
    _builtin("block", "draft_rules:Block", _ONE_HOT | _SAMPLED, on_trees="tree_delta", paper="2403.10444"),
    _builtin("typical", "sibling_rules:Typical", _ANY, tree=True, lossless=False, paper="2401.10774"),
    _builtin("threshold", "sibling_rules:Threshold", _ANY, tree=True, lossless=False),
)}  # fmt: skip
"""All verifiers that have a distribution, by name; the rule of each is its home here, and is not made yet."""

RULES: Registry[object] = Registry(
    "verifier",
    "specsparse.speculative.verify:Rule",
    "specsparse.speculative.verifiers",
    {name: str(verifier.rule) for name, verifier in BUILTIN.items()}
    | {SYNTHETIC: "specsparse.speculative.drafters.synthetic:SyntheticRates"},
)
"""The rule of each verifier; its fields are the options. One's own is a `Rule` with `kinds`, or a `Verifier`."""


def same_text(name: str) -> bool:
    """Whether that verifier promises plain decoding's tokens, bit for bit; others keep the distribution at most."""
    return name in BUILTIN and BUILTIN[name].lossless and not BUILTIN[name].needs_p


def get_verifier(name: str, **options: object) -> Verifier:
    """The verifier of that name, of that `module:Class` (a `Rule`), or that `module:NAME` (a `Verifier`).

    `options` are those of its rule; None is an option that was not given. UserError: an unknown name or option (with
    the nearest valid one), a value of the wrong type or out of range."""
    if name == SYNTHETIC:
        raise UserError(f"verifier={name} makes up the acceptance of a drafter's chains: it is made with a drafter")
    if name in BUILTIN:
        verifier = dataclasses.replace(BUILTIN[name], rule=RULES.make(name, options))
        return next((known for known in VERIFIERS.values() if known == verifier), verifier)
    found = RULES.look(name)
    if isinstance(found, Verifier):
        rule = read(type(found.rule), {**vars(found.rule), **options}, group="verifier", name=name)
        return dataclasses.replace(found, rule=rule) if options else found
    if not isinstance(found, type):
        raise UserError(f"verifier={name} is no specsparse.speculative.base.Verifier: make one of a rule")
    own = RULES.make(name, options)
    if not own.kinds:
        raise UserError(f"verifier={name} says no `kinds`: the draws that its rule is sound for")
    return Verifier(name, own, own.kinds, tree=own.tree, lossless=own.lossless, needs_p=own.needs_p, paper=own.paper)


@functools.cache
def _by_default(name: str) -> Verifier:
    return dataclasses.replace(BUILTIN[name], rule=RULES.make(name, {}))


class _Defaults(Mapping[str, Verifier]):
    """Each is made when it is asked for, so that the names alone cost no jax."""

    def __getitem__(self, name: str) -> Verifier:
        return _by_default(name)

    def __iter__(self) -> Iterator[str]:
        return iter(BUILTIN)

    def __len__(self) -> int:
        return len(BUILTIN)


VERIFIERS: Mapping[str, Verifier] = _Defaults()
"""All verifiers by name, with default options."""


def valid_verifiers(kind: DraftKind, *, tree: bool, temperature: float | None = None) -> list[str]:
    """Names of the verifiers that accept such drafts, lossless ones first."""
    ok = [v for v in VERIFIERS.values() if v.accepts(kind, tree=tree, temperature=temperature)]
    return [v.name for v in sorted(ok, key=lambda v: not v.lossless)]
