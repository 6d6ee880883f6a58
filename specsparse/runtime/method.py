"""How to decode: a method as people say it (`MethodSpec`), and as it runs on a model (`Method`).

`resolve` leads from one to the other for all that decode: `generate`, experiments, chat, serve, bench. Without a model
it is the check before a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, overload

from specsparse.engine.model import Model
from specsparse.engine.pytree import Pytree
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError, refuse
from specsparse.models import catalogue
from specsparse.runtime.load import load
from specsparse.runtime.timing_cache import STEP_FLOOR, policy_times
from specsparse.speculative.base import (
    GAMMA_NAMES,
    SHORT_GAMMA,
    AnyDrafter,
    Drafter,
    DraftKind,
    LoadedDrafter,
    Verifier,
)
from specsparse.speculative.drafters import DRAFTERS, check_is_drafter, draw_temperature, get_drafter, takes
from specsparse.speculative.drafters.synthetic import synthetic_verifier
from specsparse.speculative.policies import default_policy, get_policy, over_tree
from specsparse.speculative.policies.base import Fixed, Policy, check_policy
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.base import TreeShape
from specsparse.speculative.verifiers import RULES, SYNTHETIC, get_verifier, same_text, valid_verifiers
from specsparse.support import registry
from specsparse.support.registry import Choice

GREEDY = SamplingParams(temperature=0.0)
NO_DRAFTER = "none"
"""The name that stands for plain decoding."""


@dataclass(frozen=True, init=False)
class MethodSpec:
    """The parts of a method. Each is given as a name, a name with options (`Choice`), or the part itself.

    Attributes:
        drafter: who proposes; None and "none" are plain decoding.
        verifier: who decides; None is the first lossless one that fits the drafter.
        policy: how much is drafted in a round. None: what the drafter's options say, or what pays on this machine if
            they say nothing.
        tree: the shape of the drafts of a drafter by name; None and "chain" are chains.
        sampling: of the target. Its temperature decides which verifiers fit.
    """

    drafter: Choice | AnyDrafter | None
    verifier: Choice | Verifier | None
    policy: Choice | Policy | None
    tree: Choice | TreeShape | None
    sampling: SamplingParams

    def __init__(
        self, drafter: str | Choice | AnyDrafter | None = None, verifier: str | Choice | Verifier | None = None,
        policy: str | Choice | Policy | None = None, tree: str | Choice | TreeShape | None = None,
        sampling: SamplingParams = GREEDY,
    ):  # fmt: skip
        parts = {"drafter": drafter, "verifier": verifier, "policy": policy, "tree": tree, "sampling": sampling}
        for name, part in parts.items():
            object.__setattr__(self, name, Choice(part) if isinstance(part, str) else part)
        if isinstance(self.drafter, Choice) and self.drafter.name == NO_DRAFTER:
            object.__setattr__(self, "drafter", None)
        if not isinstance(self.drafter, Choice | None):
            check_is_drafter(self.drafter)
        refuse({
            f"verifier must be a registered name or a Verifier, not {type(self.verifier).__name__}":
                not isinstance(self.verifier, Choice | Verifier | None),
            "a verifier needs a drafter: give drafter=prompt_lookup, or leave the verifier out":
                self.drafter is None and self.verifier is not None,
        })  # fmt: skip

    @property
    def bare_name(self) -> str | None:
        """The drafter's name if nothing else is said of its drafts, else None."""
        if not isinstance(self.drafter, Choice) or self.drafter.options or self.policy or self.tree:
            return None
        return self.drafter.name

    @property
    def temperature(self) -> float:
        """The temperature of the target, 0 for greedy decoding."""
        return 0.0 if self.sampling.greedy else self.sampling.temperature

    def arguments(self) -> dict[str, Any]:
        """`drafter`, `verifier` and `policy` as `specsparse.generate` takes them, checked; {} for plain decoding."""
        made = resolve(self)
        if made.drafter is None:
            return {}
        policy = {} if made.policy is None else {"policy": made.policy}
        return {"drafter": self.bare_name or made.drafter, "verifier": made.verifier, **policy}


class UnfitPair(UserError):
    """A verifier whose promise such drafts would break."""

    def __init__(self, message: str, kind: DraftKind):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class MethodParts:
    """The parts of a method, which go together. Without a drafter it is plain decoding."""

    drafter: AnyDrafter | None = None
    verifier: Verifier | None = None
    policy: Policy | None = None  # how much is drafted in a round; None if that is the drafter's room alone

    @property
    def max_nodes(self) -> int:
        """K, the tokens or nodes that a draft has room for."""
        return self.drafter.max_nodes if self.drafter else 0

    @property
    def files(self) -> Mapping[str, str]:
        """The drafter's options that name a model of the catalogue or a file of one, before it is loaded."""
        return self.drafter.files if self.drafter else {}


@dataclass(frozen=True)
class Method(MethodParts):
    """How to decode on a model, checked and loaded."""

    drafter: Drafter | None = None
    weights: Callable[[int], Pytree] | None = None  # cache capacity -> the drafter's weights; None if it has none
    share: float = 0.0  # guessed time of a drafted token in plain steps, by the bytes it reads; 0 if it has no weights
    kv_share: float = 0.0  # of what a step of one row reads of a long text, what drafting a token reads
    # what records say of the drafter, such as how two vocabularies overlap
    about: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # the same in lines


@overload
def resolve(spec: MethodSpec, target: None = None, *, batch: int = 1) -> MethodParts: ...
@overload
def resolve(spec: MethodSpec, target: Model, *, batch: int = 1) -> Method: ...
def resolve(spec: MethodSpec, target: Model | None = None, *, batch: int = 1) -> MethodParts:
    """The method of a spec; with a target ready to run on it.

    Without a target nothing is loaded. With one, the drafter's own model is loaded the first time it is asked for. A
    drafter by its bare name, or a spec that says nothing of how long drafts are, drafts no more than pays
    (`policies.default_policy`) in a batch of so many sequences. If a text depends on how long its drafts were
    (`verifier=token` and the like), what pays a single sequence decides, so that a sequence is written in a batch as it
    is alone. UserError: an unknown name or option, or parts that do not go together."""
    drafter, policy = _drafter(spec)
    if drafter is None:
        return Method()
    verifier = _verifier(drafter, spec)
    if target is None:
        return MethodParts(drafter, verifier, policy)
    loaded, share, kv_share, name = load_drafter(target, drafter), 0.0, 0.0, spec.bare_name
    if loaded.weights is not None:
        share = loaded.bytes_per_token / max(target.footprint.file, 1) + STEP_FLOOR
        c = target.config
        kv_share = loaded.keys_per_token / max(c.endless_kv(), c.n_kv_heads * c.head_dim)
    made = loaded.drafter
    if name is not None or (spec.policy is None and drafter.any_length):
        gamma = made.max_nodes if made.tree else SHORT_GAMMA
        batch = batch if same_text(verifier.name) else 1
        levels = made.max_depth if made.tree and not made.asks_worth else None
        times = policy_times(target, gamma, name, share=share, kv_share=kv_share, levels=levels, batch=batch)
        policy = default_policy(times, gamma=gamma, tree=made.tree)
    policy = _fitting(policy or drafter.length_policy, made)
    made = made if policy is None else made.with_room(policy.gamma)
    return Method(made, verifier, policy, loaded.weights, share, kv_share, loaded.about, loaded.notes)


def ready(spec: MethodSpec, target: Model, *, batch: int = 1) -> tuple[Model, Method]:
    """The model that decodes, which of an automatic width is one that holds the drafts, and the method on it."""
    if target.narrow is not None:
        target = target.holding(1 + resolve(spec).max_nodes)
    return target, resolve(spec, target, batch=batch)


def drafts_trees(name: str) -> bool:
    """Whether the drafter of that name takes the shape of a tree."""
    return "tree" in takes(name)


def _drafter(spec: MethodSpec) -> tuple[AnyDrafter | None, Policy | None]:
    """The drafter in the shape of its tree, drawing as its verifier needs, and the policy that was asked for."""
    if isinstance(spec.drafter, Choice):
        drafter, policy = _named_drafter(spec.drafter, spec)
    elif spec.drafter is None:
        return None, None
    else:
        drafter, policy = spec.drafter, spec.policy
        drafter.check()
        if isinstance(policy, Choice):
            policy = _policy(policy, drafter.max_nodes if drafter.tree else None)
        drafter = drafter if policy is None else drafter.with_policy(policy)
    if (built := drafter.built) is not None:
        return built, _fitting(policy, built)
    drawn_at = None if spec.verifier is None else draw_temperature(spec.verifier.name, spec.temperature)
    return drafter if drawn_at is None else drafter.drawing_at(drawn_at), None


def _policy(chosen: Choice, tree_nodes: int | None) -> Policy:
    given = {key: value for key, value in chosen.options.items() if value is not None}
    return get_policy(chosen.name, **(given if tree_nodes is None else over_tree(chosen.name, given, tree_nodes)))


def _named_drafter(chosen: Choice, spec: MethodSpec) -> tuple[AnyDrafter, Policy | None]:
    name, options, policy, tree = chosen.name, dict(chosen.options), spec.policy, spec.tree
    known = takes(name)
    if isinstance(tree, Choice):
        tree = get_tree(tree.name, **tree.options)
    if tree is not None:
        if known and "tree" not in known:
            names = ", ".join(filter(drafts_trees, DRAFTERS.names()))
            raise UserError(f"drafter={name} drafts chains: trees are for drafter={names}")
        options["tree"] = tree
    if isinstance(policy, Choice):
        policy = _policy(policy, None if tree is None else tree.max_nodes)
    said = [key for key in options if key in ("max_nodes", *GAMMA_NAMES) and options[key] is not None]
    if said and "policy" in known and not (policy is tree is None):
        raise UserError(f"drafter.{said[0]}: how long drafts are is said by the policy, as policy.gamma")
    if policy is not None and "policy" in known:
        options |= {"max_nodes": policy.gamma} if policy.always else {"policy": policy}
    elif policy is not None and "max_nodes" in known and not said:
        options["max_nodes"] = policy.gamma
    return get_drafter(name, **options), policy


def _fitting(policy: Policy | None, drafter: Drafter) -> Policy | None:
    """The policy if that drafter can follow it; None if it leaves all drafts as they are."""
    if policy is None:
        return None
    check_policy(policy, drafter.kind)
    if policy.needs and not drafter.asks_stop:
        raise UserError(
            f"policy={policy.name} looks at the distributions of the draft, and {type(drafter).__name__} has none: "
            "choose policy=fixed, heuristic, cost or auto_off"
        )
    idle = policy.always and policy.gamma >= drafter.max_nodes and not drafter.asks_stop
    return None if idle else policy


def _verifier(drafter: AnyDrafter, spec: MethodSpec) -> Verifier:
    """The verifier; `synthetic` makes the acceptance of any chain up."""
    chosen, temperature, own = spec.verifier, spec.temperature, drafter.own_verifier
    if chosen is None:
        fit = valid_verifiers(drafter.kind, tree=drafter.tree, temperature=temperature)
        chosen = own or Choice(fit[0])
    if own is not None and chosen.name != own.name:
        raise UserError("drafter=synthetic drafts no text, its acceptance is made up: choose verifier=synthetic")
    if isinstance(chosen, Choice):
        options = {key: value for key, value in chosen.options.items() if value is not None}
        if chosen.name != SYNTHETIC:
            chosen = get_verifier(chosen.name, **options)
        elif drafter.tree:
            raise UserError("verifier=synthetic makes up the acceptance of chains, not of trees")
        elif own is not None and not options.keys() - {"process"}:
            return own
        else:
            rates = RULES.make(SYNTHETIC, options)
            rates.conditional(drafter.max_nodes)  # a mean length that is too long is found before a model is loaded
            return synthetic_verifier(rates)
    if drafter.tree and (other := chosen.on_trees) and get_verifier(other).accepts(drafter.kind, tree=True):
        chosen = get_verifier(other)
    if chosen.accepts(drafter.kind, tree=drafter.tree, temperature=temperature):
        return chosen
    names = ", ".join(valid_verifiers(drafter.kind, tree=drafter.tree, temperature=temperature))
    whose = f" of drafter={spec.drafter.name}" if isinstance(spec.drafter, Choice) else ""
    drafts = f"{drafter.kind.value} {'tree' if drafter.tree else 'chain'} drafts{whose}"
    message = f"verifier={chosen.name} cannot verify {drafts} at temperature {temperature:g}: choose one of {names}"
    can_draw = drafter.can_draw and not drafter.tree
    if can_draw and chosen.accepts(DraftKind.SAMPLED, tree=False, temperature=temperature):
        message += f"; or set drafter.temperature above 0, which draws the drafts that {chosen.name} verifies"
    raise UnfitPair(message, drafter.kind)


def load_drafter(target: Model, drafter: AnyDrafter) -> LoadedDrafter:
    """The drafter for this target, with room for its policy; what it needs is loaded once, whatever the policy."""
    key = drafter.with_policy(Fixed(1))
    if key not in target.programs.drafters:
        if not drafter.on_mesh:
            target.check_whole("the drafter with these options")
        target.programs.drafters[key] = drafter.build(target, partial(_load, target))
    loaded, policy = target.programs.drafters[key], drafter.length_policy
    return loaded if policy is None else loaded._replace(drafter=loaded.drafter.with_room(policy.gamma))


def _load(target: Model, kind: str, spec: Any) -> Any:
    """What `build` of a drafter loads by, beside this target."""
    if kind == "fewer_neurons":
        from specsparse.powerinfer.fewer import with_fewer_neurons  # plain decoding does not wait for it

        return with_fewer_neurons(target, **spec)
    if kind != "model":
        return registry.load(kind, "drafter")(catalogue.published(spec))
    kv_dtype = "f16" if target.kv_dtype == "q8_0" else target.kv_dtype  # heads of any size
    draft = load(spec, backend=target.kernels.name, kv_dtype=kv_dtype, width=0)
    return replace(draft, params=target.everywhere(draft.params))  # of a mesh on every device
