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
# A drafter proposes tokens. They may be wrong, since the verifier decides. So an idea needs little code, and the same
# run as for all drafters measures its gain.

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
# The drafter finds the last occurrence of the newest token and proposes the tokens that followed it. It has no weights
# and no state. All code is array operations over the batch, since it runs inside the compiled decode loop.
#
# * the fields are the options, with their defaults and bounds; `max_nodes` is the length of a draft;
# * `kind` says how tokens were chosen, which decides the verifiers that are allowed;
# * `draft` sees the text so far (`ctx.tokens[:, :ctx.length]`) and proposes at most `ctx.budget` tokens;
# * `init` and `commit`, left out here, would make a state and update it after the verdict.
#
# The class is in a file outside the package:

# %%
print(Path("last_seen.py").read_text())

# %% [markdown]
# `module:Class` names it everywhere, from the current folder or from PYTHONPATH. Here in Python, on the command line as
#
#     python -m specsparse.run drafter=last_seen:LastSeen drafter.max_nodes=4 model=smollm2-135m
#
# ## Does it keep the contract?
#
# One line of your own tests checks it: shapes and budgets, no read beyond the text, independent rows of a batch, one
# compilation for all texts.

# %%
check_drafter(get_drafter("last_seen:LastSeen", max_nodes=4))

# %% [markdown]
# ## Is it right?
#
# `greedy` keeps plain decoding's tokens, so the two texts must be equal.

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
# Compare it with prompt lookup, which drafts only after a match of two tokens.

# %%
theirs = specsparse.generate(model, chat, max_tokens=TOKENS, drafter="prompt_lookup", verifier="greedy")
for name, run in {"last seen": mine, "prompt lookup": theirs}.items():
    c = run.stats.counters
    share = c.num_accepted_tokens / max(c.num_draft_tokens, 1)
    print(f"{name:<14} {c.num_emitted_tokens / c.num_rounds:.2f} tokens a pass, {share:.0%} of the drafted ones stayed")

# %% [markdown]
# A package gives it a name by an entry point in its `pyproject.toml`:
#
#     [project.entry-points."specsparse.drafters"]
#     last_seen = "last_seen:LastSeen"
#
# Trees and policies are classes in the same way (`tree=`, `policy=`); a verifier is a `Verifier` made of a rule
# (`verifier=mine:VERIFIER`).
