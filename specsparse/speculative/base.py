"""Types of speculative decoding: what a drafter proposes and what a verifier decides.

Rows and nodes: the target verifies one round with a forward pass of K+1 rows. Row 0 is the last committed token (the
root), row 1+i is node i of the draft. `-1` is the root where a node index stands, and "nothing" where a token stands.
"""

import abc
import dataclasses
import enum
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, Self

from specsparse.engine.pytree import AnyArray, Pytree
from specsparse.errors import refuse
from specsparse.support.options import Also, Range, shown

if TYPE_CHECKING:  # for the types alone: kinds of draws are known without it
    import jax
    import numpy as np

    from specsparse.engine.model import Model
    from specsparse.speculative.drafters.spec import Load
    from specsparse.speculative.policies.base import ActivePolicy, DraftView, Policy
    from specsparse.speculative.verify import Rule

# How many tokens a round drafts: `max_nodes` inside; outside it is gamma, or what other projects call it.

SHORT_GAMMA = 4
"""Most tokens that a round drafts by default: more of them cost more than they bring on most texts."""
DEFAULT_GAMMA = 7
"""Of a policy: 8 positions a forward pass."""
MAX_GAMMA = 512
"""Most tokens a round may draft."""
MAX_NODES = 64
"""Most nodes of a tree: what one verifying forward may hold."""
MOST_ROOM = 4096
"""Most nodes of a draft of a drafter or template made in Python: a round has arrays of them."""
GAMMA_NAMES = (
    "gamma",
    "num_speculative_tokens",
    "draft_max",
    "num_assistant_tokens",
    "prompt_lookup_num_tokens",
    "n_draft",
)
"""Everybody's names of that number."""

MaxNodes = Annotated[int, Range(1, MAX_GAMMA), Also(*GAMMA_NAMES)]
"""Most tokens of a draft, as an option."""

ROOT = -1
"""Parent of the nodes that follow the last committed token."""

PAD = -1
"""Token id of an empty slot."""


class DraftKind(enum.Enum):
    """How the tokens of a draft were drawn, which decides the verifiers that keep the target's distribution."""

    ONE_HOT = "one_hot"
    """Chosen, not drawn: argmax, top-k rank, n-gram, p_split, confidence-ranked. q is 1 at the token."""
    SAMPLED = "sampled"
    """Drawn from q, one child per node."""
    IID = "iid"
    """Siblings drawn independently from one q, in draw order, equal draws kept apart; their q rows are equal."""
    WOR = "wor"
    """Siblings drawn without replacement, in draw order; each from q without its elder siblings, renormalised."""


class Draft(NamedTuple):
    """The proposal of one round: a tree of at most K nodes for each of B sequences.

    Invariants: a parent precedes its children; siblings stand in draw order; nodes `i >= count` do not exist and
    hold anything. A chain has parents `i - 1`.

    Attributes:
        tokens: int32[B, K].
        parents: int32[B, K], node index of the parent or `ROOT`.
        count: int32[B], nodes really drafted, 0..K.
        q: float32[B, K, V], the distribution node i was *really* drawn from (after temperature, truncation and, without
            replacement, after its elder siblings were removed and the rest renormalised); None for one-hot drafts. A
            node whose row has no mass at its own token is never accepted and leaves p alone.
    """

    tokens: AnyArray
    parents: AnyArray
    count: AnyArray
    q: AnyArray | None = None

    @property
    def max_nodes(self) -> int:
        """K, nodes that a draft has room for; static."""
        return self.tokens.shape[-1]


class Verdict(NamedTuple):
    """A verifier's verdict on a draft. Every round emits at least one token.

    Attributes:
        tokens: int32[B, K+1], emitted tokens: the accepted path, then one more; padded with `PAD`.
        count: int32[B], emitted tokens, `accepted + 1`.
        nodes: int32[B, K], accepted nodes from the root down (ascending), padded with `PAD`.
        accepted: int32[B], accepted nodes.
        tested: int32[B], tested positions: levels of the draft up to and including the first rejection, so that
            accepted / tested estimates the acceptance of a token. A level whose siblings are all rejected counts once;
            `block`, which judges a draft as a whole, rejects the level after the accepted ones.
        alpha: float32[B], sum over tested positions of the verifier's acceptance probability before the token is known
            (`token` sum_x min(p, q), one-hot p(x), `match` with a sampled draft sum_x p q). Chains only; 0 where it was
            not measured.
        alpha_var: float32[B], sum of alpha_i (1 - alpha_i) over the same positions.
        failed: bool[B], the distribution the last token comes from was not a distribution (NaN or no mass); that token
            is 0 and the sequence must stop with an error.
    """

    tokens: "jax.Array"
    count: "jax.Array"
    nodes: "jax.Array"
    accepted: "jax.Array"
    tested: "jax.Array"
    alpha: "jax.Array"
    alpha_var: "jax.Array"
    failed: "jax.Array"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """V, part of the structure of a context and no array in it (`speculative.loop` registers it with jax)."""

    size: int


class DraftContext(NamedTuple):
    """The view of a round that every drafter gets.

    `length` counts the last emitted token too; the target's cache holds one token fewer, because that token is row 0 of
    the next forward pass.

    Attributes:
        tokens: int32[B, C], all committed ids (prompt and output), anything beyond `length`.
        length: int32[B].
        budget: int32[B], most nodes to draft this round, as the policy says (0 asks for an empty draft); also bounds
            the depth.
        seed: seed of each sequence, as `engine.noise` takes it.
        sample: sample index of each sequence, as `engine.noise` takes it.
        round: int32[B], rounds finished by each sequence.
        params: the target's weights (self-drafts), or None.
        cache: the target's cache, or None. A self-draft may write to slots at and beyond the cache's length; the
            verification overwrites them.
        text: what `Drafter.read_text` made of the committed text, else None.
        policies: the draft-length policy of each of the drafter's sources; empty without a policy.
        vocabulary: its size is `vocab`; None outside a round.
    """

    tokens: "jax.Array"
    length: "jax.Array"
    budget: "jax.Array"
    seed: "jax.Array"
    sample: "jax.Array"
    round: "jax.Array"
    params: Pytree = None
    cache: Pytree = None
    text: Pytree = None
    policies: "tuple[ActivePolicy, ...]" = ()
    vocabulary: Vocabulary | None = None

    @property
    def vocab(self) -> int | None:
        """V, the number of the target's ids: a plain number, also while `draft` is traced; None outside a round."""
        return None if self.vocabulary is None else self.vocabulary.size

    @property
    def needs(self) -> frozenset[str]:
        """Fields of a `DraftView` that `stop` reads; empty if no policy ends drafts early."""
        return self.policies[0].policy.needs if self.policies else frozenset()

    def stop(self, view: "DraftView") -> "jax.Array":
        """bool[B]: whether to end the draft before its next node is drawn from the distribution in view."""
        return self.policies[0].policy.stop(self.policies[0].state, view) if self.policies else view.depth < 0

    def from_source(self, source: int) -> "DraftContext":
        """The context of one of the drafter's sources: its policy, and the budget that it sets."""
        if not self.policies:
            return self
        active = self.policies[source]
        return self._replace(budget=active.policy.budget(active.state, self), policies=(active,))

    def keep(self, count_B: "jax.Array") -> "jax.Array":
        """int32[B]: how many of the nodes that this source drafted are verified."""
        return self.policies[0].policy.keep(self.policies[0].state, count_B) if self.policies else count_B

    def worth(self, reach_BK: "jax.Array") -> "jax.Array":
        """int32[B]: how many nodes of a one-hot tree pay, of those in the order of float32[B, K] `reach`, which falls:
        the chance that each is accepted."""
        return self.policies[0].policy.worth(self.policies[0].state, reach_BK) if self.policies else self.budget

    def deeper(self, gain_B: "jax.Array") -> "jax.Array":
        """bool[B]: whether the time of drafting one more level of a tree pays if it brings `gain` tokens."""
        return self.policies[0].policy.deeper(self.policies[0].state, gain_B) if self.policies else gain_B > 0


class Drafted(NamedTuple):
    """Result of `Drafter.draft`."""

    draft: Draft
    state: Pytree  # the drafter's next state
    cache: Pytree  # `ctx.cache`, as it is after the draft (the same object if the drafter does not use it)
    source: "jax.Array | None" = None  # int32[B], which of the drafter's sources drafted; None if it has one
    # bool[B], sequences that end with an error here, of which `Drafter.failure` says why; None for none
    failed: "jax.Array | None" = None
    # int32[B], nodes whose drafting took the time of one; None for as many as were drafted
    passes: "jax.Array | None" = None


class Feedback(NamedTuple):
    """The outcome of a round, from which a drafter learns."""

    draft: Draft
    verdict: Verdict
    # float[B, K+1, D], the target's features of all rows as `Drafter.wants_hidden` says, or None
    hidden: "jax.Array | None" = None
    # int32[B, K+1, R], the R = `Drafter.wants_top` tokens that the target finds most likely behind each row, best
    # first; anything at rows that were not verified. None if R is 0
    top: "jax.Array | None" = None
    # float32[L, B, G, C/16], where the root's row looked, as `ForwardOut.mass`; None unless `Drafter.wants_mass`
    mass: "jax.Array | None" = None


class LoadedDrafter(NamedTuple):
    """A drafter ready to run."""

    drafter: "Drafter"  # static
    # cache capacity of the target -> the drafter's weights; None if it has none
    weights: Callable[[int], Pytree] | None = None
    bytes_per_token: int = 0  # of weights that drafting a token reads
    keys_per_token: int = 0  # for each token of the text, keys (as numbers) that drafting a token reads
    # what records say of it, as plain values by name, such as how two vocabularies overlap
    about: Mapping[str, object] = MappingProxyType({})
    notes: tuple[str, ...] = ()  # the same in lines


class AnyDrafter(abc.ABC):
    """The facts of a drafter before it runs: a `Drafter`, or the `DrafterSpec` of one that needs a model."""

    @property
    def on_mesh(self) -> bool:
        """Whether the target's matrices may be divided among devices."""
        return True

    @property
    def can_draw(self) -> bool:
        """Whether a temperature above 0 makes it draw its drafts from distributions that a verifier can weigh."""
        return False

    @property
    def built(self) -> "Drafter | None":
        """Itself if it runs as it is, or None if only `build` makes the drafter."""
        return None

    @property
    @abc.abstractmethod
    def kind(self) -> DraftKind:
        """How the tokens of a draft are drawn."""

    @property
    @abc.abstractmethod
    def max_nodes(self) -> int:
        """K: nodes a draft has room for."""

    @property
    def tree(self) -> bool:
        """Whether a node may have more than one child."""
        return False

    @property
    def own_verifier(self) -> "Verifier | None":
        """The only verifier that its drafts are for, or None."""
        return None

    @property
    def length_policy(self) -> "Policy | None":
        """The draft-length policy that its own options say, or None."""
        return None

    @property
    def any_length(self) -> bool:
        """Whether its options leave the length of its drafts to what pays on this machine."""
        return False

    @property
    def files(self) -> Mapping[str, str]:
        """Options that name a file or a name of the catalogue, and their values: it must be there before a run."""
        return {}

    def check(self) -> None:
        """Refuses missing or impossible facts, such as a head without a path."""
        return None

    def with_policy(self, policy: "Policy") -> Self:
        """The same with that policy among its options, if it has such options."""
        return self

    def drawing_at(self, temperature: float) -> Self:
        """The same drawing its drafts at that temperature, if its options leave it open."""
        return self

    @abc.abstractmethod
    def build(self, target: "Model", load: "Load") -> LoadedDrafter:
        """The drafter for this target, and its weights; `runtime.method.load_drafter` gives it room for a policy."""


class Drafter(AnyDrafter):
    """Base of all drafters: final frozen dataclasses that hold static facts; weights and state are pytrees.

    All methods are pure and jit-able. Weights come as an argument (`params`, None if there are none), never by closure.
    A drafter holds no policy: `ctx.budget` says how much to draft, `ctx.stop` when to end a draft from distributions.

    Attributes:
        has_sources: whether it drafts by other drafters and gives each its budget itself (`ctx.from_source`).
        reads_text: whether it drafts in tokens of its own, for a text that the host reads and writes (`read_text`,
            `write_text`): `runtime.loops` runs its rounds.
    """

    has_sources: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False

    @property
    def built(self) -> Self:
        """The drafter, which needs no model to be built."""
        return self

    @property
    def asks_stop(self) -> bool:
        """Whether `draft` asks `ctx.stop` before each node, as policies that read the draft's q need."""
        return False

    @property
    def asks_worth(self) -> bool:
        """Whether `draft` asks `ctx.worth` and `ctx.deeper`, so that a tree takes no more time than pays."""
        return False

    @property
    def max_depth(self) -> int:
        """Longest path a draft may have; K for a chain."""
        return self.max_nodes

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:
        """What `init` and `commit` need of the target's hidden states, as `engine.llama.Want.hidden` says it.

        True for the rows before the output norm, or ids of layers for the rows that enter these, side by side.
        """
        return False

    @property
    def wants_top(self) -> int:
        """How many of the target's most likely tokens behind each verified row `commit` needs."""
        return 0

    @property
    def wants_mass(self) -> bool:
        """Whether `commit` needs the weights of the target's attention (`Feedback.mass`)."""
        return False

    def with_room(self, nodes: int) -> Self:
        """The same with room for drafts of so many nodes, if that is for a policy to say."""
        return self

    def source_policies(self, policy: "Policy") -> "tuple[Policy, ...]":
        """The policy of each source of drafts; of several, `draft` says which one drafted."""
        return (policy,)

    def init(self, params: Pytree, ctx: DraftContext, *, hidden: "jax.Array | None" = None) -> Pytree:
        """State after the prompt: `ctx.tokens[:, :length]` is the prompt and the first emitted token, if there is one.

        `hidden` is float[B, n, D], the target's features of the prompt (row i is position i),
        as wide as `wants_hidden` says. By default no state.
        """
        return None

    @abc.abstractmethod
    def draft(self, params: Pytree, state: Pytree, ctx: DraftContext) -> Drafted:
        """Proposes continuations of `ctx.tokens[:, :length]`, `count <= budget`; consumes noise stream `draft`."""

    def commit(self, params: Pytree, state: Pytree, ctx: DraftContext, feedback: Feedback) -> Pytree:
        """State after the verdict; `ctx` already holds the emitted tokens. By default as it was."""
        return state

    def read_text(self, state: Pytree, tokens_BC: "np.ndarray", length_B: "np.ndarray") -> Pytree:
        """`ctx.text`, in numpy, for the committed ids int32[B, C] of the target; `state` is None before `init`. On the
        host, and only if `reads_text`."""
        return None

    def write_text(self, drafted: Drafted, tokens_BC: "np.ndarray", length_B: "np.ndarray") -> Drafted:
        """The same draft in the target's tokens, behind these committed ids. On the host, and only if `reads_text`."""
        return drafted

    def failure(self, tokens: "np.ndarray") -> str | None:
        """Why a draft behind the text int32[n] was `failed`, in one line; None if it was not."""
        return None

    def check(self) -> None:
        """Refuses a kind, room or depth of the wrong type."""
        name, kind = type(self).__name__, self.kind
        wrong = {f"{name}.kind={shown(kind)} must be a DraftKind, such as ONE_HOT": not isinstance(kind, DraftKind)}
        for fact in ("max_nodes", "max_depth"):
            value = getattr(self, fact)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            whole = whole and 1 <= int(value) <= MOST_ROOM
            wrong[f"{name}.{fact}={shown(value)} must be a whole number from 1 to {MOST_ROOM}"] = not whole
        refuse(wrong)

    def build(self, target: "Model", load: "Load") -> LoadedDrafter:
        """The drafter itself, which needs no model to be built."""
        return LoadedDrafter(self)


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A named verifier: a rule with its options and the drafts it is sound for. See `verifiers.VERIFIERS`.

    Attributes:
        name: the name in configs and reports.
        rule: a frozen rule of `speculative.verifiers` (the function and its options).
        kinds: draws it accepts.
        tree: whether it accepts drafts with several children per node.
        lossless: whether the output distribution is p exactly. Otherwise it is labelled `lossy` wherever it is named.
        needs_p: False if a token sampled from p at every row is enough (`greedy`, `match`).
        greedy_only: True if it is defined at temperature 0 only.
        on_trees: the verifier that the name stands for if the drafts are trees, which this one does not take.
        paper: arXiv id of the paper.
    """

    name: str
    rule: "Rule"
    kinds: frozenset[DraftKind]
    tree: bool = False
    lossless: bool = True
    needs_p: bool = True
    greedy_only: bool = False
    on_trees: str | None = None
    paper: str = ""

    def accepts(self, kind: DraftKind, *, tree: bool, temperature: float | None = None) -> bool:
        """Whether drafts of this kind may be verified at this temperature (None: not known yet)."""
        if self.greedy_only and temperature is not None and temperature > 0:
            return False
        return kind in self.kinds and (self.tree or not tree)
