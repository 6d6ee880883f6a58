# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own drafter in 20 lines
#
# A drafter proposes tokens; it may be as wrong as it likes, since the verifier decides. So an idea can be tried with
# little code, and what it is worth is measured by the same run as everything else.

# %%
import dataclasses
import os

import jax.numpy as jnp

import specsparse
from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.drafters import lookup

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96"))

# %% [markdown]
# ## The idea
#
# What followed this token the last time it was written will follow again. No weights and no state; everything is an
# array operation over the batch, since it runs inside the compiled decode loop.
#
# * `kind` says how tokens were chosen, which decides the verifiers that are allowed;
# * `draft` sees the text so far (`ctx.tokens[:, :ctx.length]`) and proposes at most `ctx.budget` tokens;
# * `commit` would update a state after the verdict.

# %%


@dataclasses.dataclass(frozen=True)
class LastSeen(Drafter):
    """Copies what followed the newest earlier occurrence of the last token."""

    max_nodes: int = 4
    kind = DraftKind.ONE_HOT
    max_depth = property(lambda self: self.max_nodes)
    tree = False

    def init(self, params, ctx, *, hidden=None):
        return None

    def draft(self, params, state, ctx):
        position = jnp.arange(ctx.tokens.shape[1], dtype=jnp.int32)[None]
        last = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, axis=1)
        seen = (ctx.tokens == last) & (position < ctx.length[:, None] - 1)
        start = jnp.max(jnp.where(seen, position, -1), axis=1) + 1
        follow = jnp.where(start > 0, ctx.length - start, 0)
        count = lookup.allowed(ctx, follow, max_nodes=self.max_nodes)
        return lookup.drafted(lookup.copy_chain(ctx, start, count, max_nodes=self.max_nodes), state, ctx)

    def commit(self, params, state, ctx, feedback):
        return None


# %% [markdown]
# ## Is it right?
#
# `greedy` keeps plain decoding's tokens, so the text is the proof.

# %%
model = specsparse.load(MODEL)
question = "Repeat this list, then add two more: apples, pears, plums, apples, pears, plums, apples, pears, plums."
chat = [{"role": "user", "content": question}]
plain = specsparse.generate(model, chat, max_tokens=TOKENS)
mine = specsparse.generate(model, chat, max_tokens=TOKENS, drafter=LastSeen(), verifier="greedy")
assert mine.token_ids == plain.token_ids
print(mine.text)

# %% [markdown]
# ## Is it good?
#
# Beside prompt lookup, which wants two tokens to agree before it dares to guess.

# %%
theirs = specsparse.generate(model, chat, max_tokens=TOKENS, drafter="prompt_lookup", verifier="greedy")
for name, run in {"last seen": mine, "prompt lookup": theirs}.items():
    c = run.stats.counters
    share = c.num_accepted_tokens / max(c.num_draft_tokens, 1)
    print(f"{name:<14} {c.num_emitted_tokens / c.num_rounds:.2f} tokens a pass, {share:.0%} of the drafted ones stayed")

# %% [markdown]
# To make it a choice of the configs, register it: one file under `specsparse/speculative/drafters/` and one YAML file
# under `conf/drafter/`; the contract suite of all drafters then tests it too (CONTRIBUTING.md).
