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
import os
from pathlib import Path

import specsparse
from specsparse.speculative.drafters import get_drafter
from specsparse.testing import check_drafter

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96"))

# %% [markdown]
# ## The idea
#
# What followed this token the last time it was written will follow again. No weights and no state; everything is an
# array operation over the batch, since it runs inside the compiled decode loop.
#
# * the fields are the options, with their defaults and bounds; `max_nodes` is the length of a draft;
# * `kind` says how tokens were chosen, which decides the verifiers that are allowed;
# * `draft` sees the text so far (`ctx.tokens[:, :ctx.length]`) and proposes at most `ctx.budget` tokens;
# * `init` and `commit`, left out here, would make a state and update it after the verdict.
#
# The class lies in a file of its own, which specsparse knows nothing of:

# %%
print(Path("last_seen.py").read_text())

# %% [markdown]
# `module:Class` names it everywhere, from the current folder or from PYTHONPATH. Here in Python, on the command line as
#
#     python -m specsparse.run drafter=last_seen:LastSeen drafter.max_nodes=4 model=smollm2-135m
#
# ## Does it keep the contract?
#
# One line, which belongs in your own tests: shapes and budgets, nothing read beyond the text, rows of a batch that do
# not depend on each other, one compilation for every text.

# %%
check_drafter(get_drafter("last_seen:LastSeen", max_nodes=4))

# %% [markdown]
# ## Is it right?
#
# `greedy` keeps plain decoding's tokens, so the text is the proof.

# %%
model = specsparse.load(MODEL)
question = "Repeat this list, then add two more: apples, pears, plums, apples, pears, plums, apples, pears, plums."
chat = [{"role": "user", "content": question}]
plain = specsparse.generate(model, chat, max_tokens=TOKENS)
mine = specsparse.generate(model, chat, max_tokens=TOKENS, drafter="last_seen:LastSeen", verifier="greedy")
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
# A package makes it a name for everybody who installs it, with an entry point in its `pyproject.toml`:
#
#     [project.entry-points."specsparse.drafters"]
#     last_seen = "last_seen:LastSeen"
#
# Trees and policies are classes by the same rule (`tree=`, `policy=`); a verifier is a `Verifier` made of a rule
# (`verifier=mine:VERIFIER`).
