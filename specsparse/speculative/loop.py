"""One speculative round as a step of `engine.generate.run`: draft, one forward of the target, verdict, commit."""

import jax
import jax.numpy as jnp

from specsparse.engine import cache as kv
from specsparse.engine.generate import (
    Counters,
    DecodeState,
    Job,
    Step,
    emit,
    last_token,
    running,
    score,
    target_uniform,
)
from specsparse.engine.llama import ForwardFn, Want
from specsparse.engine.noise import Stream, uniform
from specsparse.engine.sampling import LawConfig, SamplingKernels, chain_rows, law, sample, tree_rows
from specsparse.speculative.base import Draft, DraftContext, Drafter, Feedback, Verdict, Verifier
from specsparse.speculative.tree import node_depths, path_rows, row_parents
from specsparse.speculative.verify import match_verdict, verify


def context(params, job: Job, state: DecodeState, *, max_nodes: int) -> DraftContext:
    """What the drafter may look at; the budget leaves room for the token that every round adds."""
    room_B = jnp.minimum(job.limit - state.length - 1, state.cache.capacity - state.length)
    budget_B = jnp.where(running(state), jnp.clip(room_B, 0, max_nodes), 0)
    return DraftContext(
        tokens=state.tokens,
        length=state.length,
        budget=budget_B,
        seed=job.seed,
        sample=job.sample,
        round=state.counters.rounds,
        params=params,
        cache=state.cache,
    )


def make_step(
    forward: ForwardFn,
    config: LawConfig,
    kernels: SamplingKernels,
    *,
    drafter: Drafter,
    verifier: Verifier,
) -> Step:
    """One round for every running sequence. `params` is the pair (target's weights, drafter's weights).

    With a `match` verifier the output equals plain decoding bit for bit (contract C1).
    """
    K = drafter.max_nodes
    want = Want(hidden=drafter.wants_hidden)

    def rows_of(draft: Draft, tokens_Bn):
        if config.raw or not drafter.tree:  # raw laws only ask which sequence a row belongs to
            return chain_rows(tokens_Bn)
        return tree_rows(tokens_Bn, row_parents(draft.parents), depth=drafter.max_depth)

    def positions(draft: Draft, state: DecodeState):
        """int32[B, K+1], absolute position of the token that follows each row."""
        if drafter.tree:
            depth_BK = node_depths(draft.parents, max_depth=drafter.max_depth)
        else:
            depth_BK = jnp.broadcast_to(jnp.arange(1, K + 1, dtype=jnp.int32)[None], draft.tokens.shape)
        return state.length[:, None] + jnp.pad(depth_BK, ((0, 0), (1, 0)))

    def judge(job: Job, draft: Draft, state: DecodeState, tokens_Bn, logits_BnV) -> Verdict:
        B, n, V = logits_BnV.shape
        logits_RV, rows = logits_BnV.reshape(B * n, V), rows_of(draft, tokens_Bn)
        if not verifier.needs_p:
            u_R = None if config.greedy else target_uniform(job, positions(draft, state)).reshape(-1)
            token_R, ok_R = sample(config, job.law, logits_RV, state.history, rows, u_R=u_R, kernels=kernels)
            return match_verdict(draft, jnp.where(ok_R, token_R, -1).reshape(B, n))
        p_RV, ok_R = law(config, job.law, logits_RV, state.history, rows, kernels=kernels)
        p_RV = jnp.where(ok_R[:, None], p_RV, jnp.float32(0))  # no mass: the sequence fails if this row decides
        node_K = jnp.arange(K, dtype=jnp.int32)[None]
        noise = {
            "sample": job.sample[:, None],
            "position": state.length[:, None],
            "round": state.counters.rounds[:, None],
        }
        coins_BK = uniform(job.seed[:, None], stream=Stream.ACCEPT, node=node_K, **noise)
        u_B = uniform(job.seed[:, None], stream=Stream.RESIDUAL, **noise)[:, 0]
        return verify(verifier, draft, p_RV.reshape(B, n, V), coins_BK=coins_BK, u_B=u_B, draw=kernels.draw, alpha=True)

    def step(params, job: Job, state: DecodeState) -> DecodeState:
        target, own = params
        live_B = running(state)
        with jax.named_scope("draft"):
            ctx = context(target, job, state, max_nodes=K)
            draft, drafter_state, cache = drafter.draft(own, state.drafter, ctx)
        tokens_Bn = jnp.concatenate([last_token(state), draft.tokens], axis=1)
        parents_Bn = row_parents(draft.parents) if drafter.tree else None
        with jax.named_scope("verify"):
            n_valid_B = jnp.where(live_B, 1 + draft.count, 0)
            out, cache = forward(target, tokens_Bn, cache, n_valid_B=n_valid_B, parents_Bn=parents_Bn, want=want)
        with jax.named_scope("accept"):
            verdict = judge(job, draft, state, tokens_Bn, out.logits)
        before, start_B = state, state.length
        state, count_B = emit(state, job, verdict.tokens, verdict.count, verdict.failed & live_B)
        with jax.named_scope("commit"):
            # The rows of the root and of the accepted nodes; the last token emitted is fed next time.
            if drafter.tree:
                cache = kv.commit_path(cache, path_rows(verdict), count_B)
            else:
                cache = kv.commit(cache, count_B)
        if config.logprobs is not None:
            rows_Bn = jnp.maximum(path_rows(verdict), 0)
            logits_BnV = jnp.take_along_axis(out.logits, rows_Bn[:, :, None], axis=1)
            state = score(state, logits_BnV, jnp.maximum(verdict.tokens, 0), count_B, start_B)
        state = state._replace(cache=cache, counters=count(before.counters, draft, verdict, live_B, count_B))
        ctx = ctx._replace(tokens=state.tokens, length=state.length, cache=cache)
        drafter_state = drafter.commit(own, drafter_state, ctx, Feedback(draft, verdict, out.hidden))
        return state._replace(drafter=drafter_state)

    return step


def count(c: Counters, draft: Draft, verdict: Verdict, live_B, emitted_B) -> Counters:
    """The counters after a round. Accepted tokens that a stop or the limit cut off still count as accepted."""
    one_B = live_B.astype(jnp.int32)
    depth_K = jnp.arange(c.accepted_at.shape[1], dtype=jnp.int32)[None]
    return Counters(
        rounds=c.rounds + one_B,
        drafts=c.drafts + one_B * (draft.count > 0).astype(jnp.int32),
        drafted=c.drafted + one_B * draft.count,
        tested=c.tested + one_B * verdict.tested,
        accepted=c.accepted + one_B * verdict.accepted,
        emitted=c.emitted + emitted_B,
        accepted_at=c.accepted_at + one_B[:, None] * (depth_K < verdict.accepted[:, None]).astype(jnp.int32),
        alpha=c.alpha + live_B.astype(jnp.float32) * verdict.alpha,
        alpha_var=c.alpha_var + live_B.astype(jnp.float32) * verdict.alpha_var,
    )
