"""One speculative round as a step of `engine.generate.run`: draft, one forward of the target, verdict, commit."""

import contextlib
import dataclasses
import functools
from collections.abc import Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsparse.engine import cache as kv
from specsparse.engine.cache import KVCache
from specsparse.engine.generate import (
    DecodeState,
    Job,
    LoopCounters,
    Step,
    emit,
    last_token,
    put,
    running,
    score,
    target_uniforms,
)
from specsparse.engine.llama import ForwardFn, ForwardOut, Want
from specsparse.engine.noise import NoiseStream, token_uniforms, uniform
from specsparse.engine.pytree import Pytree
from specsparse.engine.sampling.params import SamplingConfig
from specsparse.engine.sampling.pipeline import chain_rows, rows_to_judge, sample, target_probs, tree_rows
from specsparse.engine.sampling.probs import SamplingKernels, ranked
from specsparse.errors import UserError, own_line
from specsparse.speculative import token_sources
from specsparse.speculative.base import (
    PAD,
    Draft,
    DraftContext,
    Drafted,
    Drafter,
    DraftKind,
    Feedback,
    Verdict,
    Verifier,
    Vocabulary,
)
from specsparse.speculative.policies.base import ActivePolicy, Policy
from specsparse.speculative.trees.base import node_depths, path_rows, row_parents
from specsparse.speculative.verify import LogitRows, Noise, Target, native_judge, of_nothing

jax.tree_util.register_static(Vocabulary)


def coins(job: Job, state: DecodeState, *, max_nodes: int) -> Noise:
    use = {"sample": job.sample[:, None], "position": state.length[:, None], "round": state.counters.rounds[:, None]}
    node_K = jnp.arange(max_nodes, dtype=jnp.int32)[None]
    coins_BK = uniform(job.seed[:, None], stream=NoiseStream.ACCEPT, node=node_K, **use)
    return Noise(coins_BK, token_uniforms(job.seed[:, None], stream=NoiseStream.RESIDUAL, **use)[:, 0])


class PolicyState(NamedTuple):
    """States of the policies of the drafter's sources, and int32[B], rounds in which they drafted nothing."""

    sources: tuple[Pytree, ...]
    off: jax.Array


@dataclasses.dataclass(frozen=True)
class Round:
    """The pieces of a round, pure and jit-able each: in one program they are a step, one by one they can be timed.

    `params` is the pair (target's weights, drafter's weights). The round owns the draft-length policy: it sets the
    drafter's budget, may drop what was drafted, and learns from the verdict. Without one, drafts take all the room.
    """

    forward: ForwardFn
    config: SamplingConfig
    kernels: SamplingKernels
    drafter: Drafter
    verifier: Verifier
    policy: Policy | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        return () if self.policy is None else self.drafter.source_policies(self.policy)

    def context(self, params, job: Job, state: DecodeState) -> DraftContext:
        """The drafter's view; the budget leaves room for the token that every round adds."""
        room_B = jnp.minimum(job.limit - state.length - 1, state.cache.capacity - state.length)
        return DraftContext(
            tokens=state.tokens,
            length=state.length,
            budget=jnp.where(running(state), jnp.clip(room_B, 0, self.drafter.max_nodes), 0),
            seed=job.seed,
            sample=job.sample,
            round=state.counters.rounds,
            params=params[0],
            cache=state.cache,
            vocabulary=Vocabulary(self.config.vocab_size),
        )

    def init(
        self, params, job: Job, state: DecodeState, *, text: Pytree = None, hidden: jax.Array | None = None
    ) -> tuple[Pytree, PolicyState | None]:
        """The drafter's and the policy's state after the prompt, of which `hidden` are the features."""
        ctx = self.context(params, job, state)._replace(text=text)
        with traced(self.drafter, "init"):
            own = self.drafter.init(params[1], ctx, hidden=hidden)
        sources = tuple(policy.begin(ctx.length) for policy in self.policies)
        return own, PolicyState(sources, jnp.zeros_like(ctx.length)) if sources else None

    def draft(self, params, job: Job, state: DecodeState, *, text: Pytree = None) -> Drafted:
        """The drafter's proposal; `text` is what `Drafter.read_text` made."""
        room = self.context(params, job, state)._replace(text=text)
        if self.policies:
            room = room._replace(policies=tuple(map(ActivePolicy, self.policies, state.policy.sources)))
        ctx = room if self.drafter.has_sources else room.from_source(0)
        with traced(self.drafter, "draft"):
            drafted = self.drafter.draft(params[1], state.drafter, ctx)
        check_drafted(self.drafter, drafted, ctx)
        count_B = drafted.draft.count if self.drafter.has_sources else ctx.keep(drafted.draft.count)
        # A user's drafter may count wrongly: below nothing would end the text.
        return drafted._replace(draft=drafted.draft._replace(count=jnp.clip(count_B, 0, room.budget)))

    def verify(self, params, state: DecodeState, draft: Draft, cache: KVCache) -> tuple[ForwardOut, KVCache]:
        """One forward of the target over the last token and the draft."""
        n_valid_B = _valid(state, draft)
        parents_Bn = row_parents(draft.parents) if self.drafter.tree else None
        return self.forward(
            params[0], _rows(state, draft), cache, n_valid_B=n_valid_B, parents_Bn=parents_Bn, want=self.want
        )

    @property
    def want(self) -> Want:
        """What the drafter and the verdict need of the target's forward."""
        return Want(hidden=self.drafter.wants_hidden, mass=self.drafter.wants_mass, zeros=False)

    def judge(self, job: Job, state: DecodeState, draft: Draft, logits_BnV) -> Verdict:
        """`accept`. If nobody drafted anything, only the root's row is looked at.

        Distributions and draws take time for each row there is room for, also for those that hold nothing, unless the
        kernels sample without writing distributions down.
        """
        if self.verifier.needs_p:
            writes_probs = native_judge(self.verifier, self.kernels) is None
        else:
            writes_probs = self.reads_alpha and draft.q is not None
        if self.kernels.sample is not None and not writes_probs:
            return self.accept(job, state, draft, logits_BnV)
        return jax.lax.cond(
            jnp.any(draft.count > 0),
            lambda: self.accept(job, state, draft, logits_BnV),
            lambda: self.accept_nothing(job, state, draft, logits_BnV),
        )

    def accept_nothing(self, job: Job, state: DecodeState, draft: Draft, logits_BnV) -> Verdict:
        q = None if draft.q is None else draft.q[:, :0]
        none = draft._replace(tokens=draft.tokens[:, :0], parents=draft.parents[:, :0], q=q)
        if self.verifier.needs_p:
            p_BV = RoundTarget(self, job, state, none, logits_BnV[:, :1]).probs[:, 0]
            return of_nothing(draft, p_BV, coins(job, state, max_nodes=0).last, self.kernels.draw)
        verdict = self.accept(job, state, none, logits_BnV[:, :1])
        more = [(0, 0), (0, draft.max_nodes)]
        tokens, nodes = (jnp.pad(x, more, constant_values=PAD) for x in (verdict.tokens, verdict.nodes))
        return verdict._replace(tokens=tokens, nodes=nodes)

    def accept(self, job: Job, state: DecodeState, draft: Draft, logits_BnV) -> Verdict:
        B, n, V = logits_BnV.shape
        if draft.q is not None and draft.q.shape[2] != V:
            raise UserError(
                f"{type(self.drafter).__name__}.draft returned q {_shown(draft.q)} where float32[{B}, {n - 1}, {V}] is "
                f"needed: the target has {V} tokens"
            )
        target = RoundTarget(self, job, state, draft, logits_BnV)
        return self.verifier.rule.verdict(draft, target, coins(job, state, max_nodes=draft.max_nodes))

    @property
    def reads_alpha(self) -> bool:
        """Whether the rule reads alpha off the target's distributions."""
        return self.verifier.rule.reads_alpha(tree=self.verifier.tree, greedy=self.config.greedy)

    def commit(
        self, params, job: Job, state: DecodeState, cache: KVCache, drafted: Drafted, verdict: Verdict, out: ForwardOut
    ) -> DecodeState:
        """The state after the round: tokens, cache, counters, the drafter's own. `state` is the one before it."""
        draft, live_B, start_B = drafted.draft, running(state), state.length
        counters = state.counters
        ctx = self.context(params, job, state._replace(cache=cache))
        failed_B = verdict.failed if drafted.failed is None else verdict.failed | drafted.failed
        state, count_B = emit(state, job, verdict.tokens, verdict.count, failed_B & live_B)
        # The rows of the root and of the accepted nodes; the last token emitted is fed next time.
        if self.drafter.tree:
            cache = kv.commit_path(cache, path_rows(verdict), count_B)
        else:
            cache = kv.commit(cache, count_B)
        if state.scores is not None:
            rows_Bn = jnp.maximum(path_rows(verdict), 0)
            logits_BnV = jnp.take_along_axis(out.logits, rows_Bn[:, :, None], axis=1)
            scores = score(state.scores, logits_BnV, jnp.maximum(verdict.tokens, 0), count_B, start_B)
            state = state._replace(scores=scores)
        if state.token_sources is not None:
            state = state._replace(
                token_sources=put(state.token_sources, token_sources.codes(draft, verdict), count_B, start_B)
            )
        state = state._replace(cache=cache, counters=count(counters, draft, verdict, live_B, count_B))
        if self.policies:
            state = state._replace(policy=self._learned(state.policy, ctx, drafted, verdict))
        ctx = ctx._replace(tokens=state.tokens, length=state.length, cache=cache)
        top_BnR = None
        if (ranks := self.drafter.wants_top) > 0:
            B, n, V = out.logits.shape
            top_BnR = ranked(self.kernels, out.logits.reshape(B * n, V), ranks).reshape(B, n, ranks)
        feedback = Feedback(draft, verdict, out.hidden, top_BnR, out.mass)
        with traced(self.drafter, "commit"):
            return state._replace(drafter=self.drafter.commit(params[1], drafted.state, ctx, feedback))

    def _learned(self, before: PolicyState, ctx: DraftContext, drafted: Drafted, verdict: Verdict) -> PolicyState:
        """The policies' states after a round with room for `ctx.budget` nodes; each learns of its own drafts alone."""
        count_B, asked_B, sources = drafted.draft.count, jnp.zeros_like(ctx.budget), []
        for i, (policy, state) in enumerate(zip(self.policies, before.sources, strict=True)):
            own_B = count_B if drafted.source is None else jnp.where(drafted.source == i, count_B, 0)
            after = policy.update(state, verdict, own_B)
            sources.append(after if drafted.passes is None else policy.passed(state, after, drafted.passes, own_B))
            wanted_B = policy.budget(state, ctx)
            # One that ended the draft before its first node asked for nothing, too.
            asked_B = jnp.maximum(asked_B, own_B if policy.needs else wanted_B)
        off_B = before.off
        if not any(policy.always for policy in self.policies):
            off_B = off_B + ((ctx.budget > 0) & (asked_B == 0)).astype(jnp.int32)
        check_state(self.policy, tuple(sources), before.sources, "update")
        return PolicyState(tuple(sources), off_B)


class RoundTarget(Target):
    """The target at the rows of a round's draft, from its logits; each part is computed when it is asked for, once."""

    def __init__(self, round: Round, job: Job, state: DecodeState, draft: Draft, logits_BnV: jax.Array):
        self._round, self._job, self._state, self._draft, self._logits_BnV = round, job, state, draft, logits_BnV
        self._logits_RV = logits_BnV.reshape(-1, logits_BnV.shape[2])
        self.draw, self.tree, self.alpha = round.kernels.draw, round.verifier.tree, round.reads_alpha

    @functools.cached_property
    def probs(self) -> jax.Array:
        """A rule that reads tokens sees there which rows are invalid, which saves a pass over V here."""
        if self._round.verifier.needs_p:
            return self.marked_probs
        return self._row_probs[0].reshape(self._logits_BnV.shape)

    @functools.cached_property
    def marked_probs(self) -> jax.Array:
        """Target distributions, float32[B, K+1, V]. An all-zero row marks an invalid one: the sequence fails there."""
        p_RV, ok_R = self._row_probs
        return jnp.where(ok_R[:, None], p_RV, jnp.float32(0)).reshape(self._logits_BnV.shape)

    @functools.cached_property
    def _row_probs(self) -> tuple[jax.Array, jax.Array]:
        """float32[R, V] and bool[R], the distributions by row and which of them are distributions."""
        round, state, node_n = self._round, self._state, jnp.arange(self._draft.max_nodes + 1, dtype=jnp.int32)
        exists_Bn = node_n[None] <= self._draft.count[:, None]  # the root, and the nodes that were really drafted
        return target_probs(
            round.config,
            self._job.sampling,
            self._logits_RV,
            state.history,
            self._paths,
            kernels=round.kernels,
            needed_R=exists_Bn.reshape(-1),
        )

    @functools.cached_property
    def tokens(self) -> jax.Array:
        """If alpha is measured, drawn from the distributions that it is read off."""
        if not self.alpha:
            return self.own_tokens
        if self._draft.q is None:
            return self._sampled_beside_draft[0]
        p_RV, ok_R = self._row_probs
        return jnp.where(ok_R, self.draw(p_RV, self._noise_RU), -1).reshape(self._logits_BnV.shape[:2])

    @functools.cached_property
    def own_tokens(self) -> jax.Array:
        """int32[B, K+1], the target's own token at each row, -1 if it has no distribution."""
        return self._sampled(None)[0]

    def at(self, tokens_BK: jax.Array) -> jax.Array:
        if self._round.verifier.needs_p:
            return super().at(tokens_BK)
        return self._sampled_beside_draft[1].reshape(self._logits_BnV.shape[:2])[:, :-1]

    @functools.cached_property
    def _sampled_beside_draft(self) -> tuple[jax.Array, jax.Array]:
        """`own_tokens`, and float32[R], the target's p of the draft's token behind each row."""
        return self._sampled(jnp.pad(self._draft.tokens, ((0, 0), (0, 1))).reshape(-1))

    def _sampled(self, tokens_R: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        round, state = self._round, self._state
        found = sample(
            round.config,
            self._job.sampling,
            self._logits_RV,
            state.history,
            self._paths,
            u_RU=None if round.config.greedy else self._noise_RU,
            tokens_R=tokens_R,
            kernels=round.kernels,
            n_valid_B=_valid(state, self._draft),
        )
        return jnp.where(found.ok, found.token, -1).reshape(self._logits_BnV.shape[:2]), found.share

    @functools.cached_property
    def rows(self) -> LogitRows | None:
        round, state = self._round, self._state
        if (judge := native_judge(round.verifier, round.kernels)) is None:
            return None
        rows_RV, probs = rows_to_judge(round.config, self._job.sampling, self._logits_RV, state.history, self._paths)
        return LogitRows(rows_RV, probs, _valid(state, self._draft), judge)

    @functools.cached_property
    def _paths(self):
        tokens_Bn = _rows(self._state, self._draft)
        if self._round.config.raw or not self._round.drafter.tree:  # raw distributions ask for a row's sequence alone
            return chain_rows(tokens_Bn)
        return tree_rows(tokens_Bn, row_parents(self._draft.parents), depth=self._round.drafter.max_depth)

    @functools.cached_property
    def _noise_RU(self) -> jax.Array:
        """float32[R, 4], keyed by the absolute position of the token that follows each row."""
        if self._round.drafter.tree:
            depth_BK = node_depths(self._draft.parents, max_depth=self._round.drafter.max_depth)
        else:
            depth_K = jnp.arange(1, self._draft.max_nodes + 1, dtype=jnp.int32)
            depth_BK = jnp.broadcast_to(depth_K[None], self._draft.tokens.shape)
        position_Bn = self._state.length[:, None] + jnp.pad(depth_BK, ((0, 0), (1, 0)))
        return target_uniforms(self._job, position_Bn).reshape(-1, 4)


_NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""What jax raises where a traced value is asked for its numbers: by numpy, `if`, int() or a boolean index."""


@contextlib.contextmanager
def traced(drafter: Drafter, method: str) -> Generator[None]:
    """Calls a method of anybody's drafter while a program is traced; refuses one that asks for a traced value."""
    try:
        yield
    except _NOT_TRACEABLE as error:
        raise UserError(
            f"{type(drafter).__name__}.{method} is traced by jax.jit, and {own_line(error)} asks a traced array for "
            "its numbers, as numpy, `if`, int() and boolean indices do: use jax.numpy, jnp.where and jax.lax.cond, or "
            "call Python from the program with jax.pure_callback (docs/drafters.md)"
        ) from None


DRAFTED = (
    "a drafter returns Drafted(draft, state, cache), where draft is Draft(tokens int32[B, K], parents int32[B, K], "
    "count int32[B], q) with K = max_nodes, and q is float32[B, K, V], or None for one-hot drafts; failed, if it is "
    "given, is bool[B]"
)
"""What `Drafter.draft` returns, for messages."""


def check_drafted(drafter: Drafter, found: object, ctx: DraftContext) -> None:
    """Refuses what is no draft for that context, while the program is traced."""
    B, K = ctx.length.shape[0], drafter.max_nodes
    wrong = ""
    if not isinstance(found, Drafted):
        wrong = type(found).__name__
    elif not isinstance(found.draft, Draft):
        wrong = f"{type(found.draft).__name__} for the draft"
    elif jax.tree.map(_shown, found.cache) != jax.tree.map(_shown, ctx.cache):
        kind = _shown(found.cache) if jax.tree.leaves(found.cache) else found.cache
        wrong = f"{kind} for the cache, which is no cache like ctx.cache"
    else:
        parts = {field: (getattr(found.draft, field), f"int32[{B}, {K}]") for field in ("tokens", "parents")}
        parts["count"] = found.draft.count, f"int32[{B}]"
        if found.failed is not None:
            parts["failed"] = found.failed, f"bool[{B}]"
        for field, (value, needed) in parts.items():
            if (shown := _shown(value)) != needed:
                wrong = f"{field} {shown} where {needed} is needed"
        q = found.draft.q
        is_probs = q is not None and getattr(q, "dtype", None) == jnp.float32 and q.ndim == 3 and q.shape[:2] == (B, K)
        if not is_probs and (q is not None or drafter.kind is not DraftKind.ONE_HOT):
            wrong = wrong or f"q {_shown(q)} where float32[{B}, {K}, V] is needed"
    if wrong:
        raise UserError(f"{type(drafter).__name__}.draft returned {wrong}: {DRAFTED}")


def check_state(part: Drafter | Policy | None, after: object, before: object, method: str = "commit") -> None:
    """Refuses a state that is not of the kind that `init` made."""
    kinds = [jax.tree.map(_shown, state) for state in (before, after)]
    if kinds[0] != kinds[1]:
        raise UserError(
            f"{type(part).__name__}.{method} returned the state {kinds[1]} where init made {kinds[0]}: "
            "structure, shapes and types stay the same"
        )


def _shown(value: object) -> str:
    """Type and shape of an array, or the type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def _rows(state: DecodeState, draft: Draft) -> jax.Array:
    """int32[B, K+1], the tokens that the target is fed."""
    return jnp.concatenate([last_token(state), draft.tokens], axis=1)


def _valid(state: DecodeState, draft: Draft) -> jax.Array:
    """int32[B], rows of each sequence that count: the root's and those of the nodes that were really drafted."""
    return jnp.where(running(state), 1 + draft.count, 0)


def make_step(pieces: Round) -> Step:
    """One round for every running sequence. `params` is the pair (target's weights, drafter's weights).

    With a `match` verifier the output equals plain decoding bit for bit (contract C1).
    """

    def step(params: Pytree, job: Job, state: DecodeState) -> DecodeState:
        with jax.named_scope("draft"):
            drafted = pieces.draft(params, job, state)
        with jax.named_scope("verify"):
            out, cache = pieces.verify(params, state, drafted.draft, drafted.cache)
        with jax.named_scope("accept"):
            verdict = pieces.judge(job, state, drafted.draft, out.logits)
        with jax.named_scope("commit"):
            after = pieces.commit(params, job, state, cache, drafted, verdict, out)
        check_state(pieces.drafter, after.drafter, state.drafter)
        return after

    return step


def count(c: LoopCounters, draft: Draft, verdict: Verdict, live_B, emitted_B) -> LoopCounters:
    """The counters after a round. Accepted tokens that a stop or the limit cut off still count as accepted."""
    one_B, share_B = live_B.astype(jnp.int32), live_B.astype(jnp.float32)
    depth_K = jnp.arange(draft.max_nodes, dtype=jnp.int32)[None]
    return c.plus(
        rounds=one_B,
        drafts=one_B * (draft.count > 0).astype(jnp.int32),
        drafted=one_B * draft.count,
        tested=one_B * verdict.tested,
        accepted=one_B * verdict.accepted,
        emitted=emitted_B,
        accepted_at=one_B[:, None] * (depth_K < verdict.accepted[:, None]).astype(jnp.int32),
        alpha=share_B * verdict.alpha,
        alpha_var=share_B * verdict.alpha_var,
    )
