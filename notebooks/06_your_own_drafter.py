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
# run as for all drafters measures its gain. First in plain Python, then compiled.

# %%
import os
from pathlib import Path

import specsparse
from specsparse.speculative.drafters import get_drafter
from specsparse.testing import check_drafter

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96"))

# %% [markdown]
# ## In plain Python
#
# `propose` gets the text so far as a list of ids and returns a list of at most `limit` ids, or `[]`. This one proposes,
# after each token, the one that has followed it most often:

# %%
print(Path("most_frequent.py").read_text())

# %% [markdown]
# `module:Class` names it everywhere, from the current folder or from PYTHONPATH. Here in Python, on the command line as
#
#     python -m specsparse.run drafter=most_frequent:MostFrequent model=smollm2-135m
#
# ## Is it right?
#
# `greedy` keeps plain decoding's tokens, so the two texts must be equal.

# %%
model = specsparse.load(MODEL)
question = "Repeat this list, then add two more: apples, pears, plums, apples, pears, plums, apples, pears, plums."
chat = [{"role": "user", "content": question}]
plain = specsparse.generate(model, chat, max_tokens=TOKENS)
first = specsparse.generate(model, chat, max_tokens=TOKENS, drafter="most_frequent:MostFrequent", verifier="greedy")
assert first.token_ids == plain.token_ids
print(first.text)

# %% [markdown]
# The run counts the time of `propose` as that of the draft. Long texts or slow ideas show there, and then the compiled
# form helps: it has no such calls.
#
# ## Compiled
#
# The drafter finds the last occurrence of the newest token and proposes the tokens that followed it. It has no weights
# and no state. All code is array operations over the batch, since it runs inside the compiled decode loop.
#
# * the fields are the options, with their defaults and bounds; `max_nodes` is the length of a draft;
# * `kind` says how tokens were chosen, which decides the verifiers that are allowed;
# * `draft` sees the text so far (`ctx.tokens[:, :ctx.length]`) and proposes at most `ctx.budget` tokens;
# * `ctx.vocab` is the number of the model's tokens, a plain number;
# * `init` and `commit`, left out here, would make a state and update it after the verdict.
#
# Three helpers of `lookup` do the rest: `allowed` cuts the length of a draft to the budget, `copy_chain` copies tokens
# of the text as a draft, and `drafted` returns it with the state.
#
# The class is in a file outside the package:

# %%
print(Path("last_seen.py").read_text())

# %%
mine = specsparse.generate(model, chat, max_tokens=TOKENS, drafter="last_seen:LastSeen", verifier="greedy")
assert mine.token_ids == plain.token_ids

# %% [markdown]
# ## Does it keep the contract?
#
# One line of your own tests checks it: shapes and budgets, no read beyond the text, independent rows of a batch, one
# compilation for all texts. It takes drafters of both kinds.

# %%
check_drafter(get_drafter("last_seen:LastSeen", max_nodes=4))

# %% [markdown]
# ## Is it good?
#
# Compare both with prompt lookup, which drafts only after a match of two tokens.

# %%
theirs = specsparse.generate(model, chat, max_tokens=TOKENS, drafter="prompt_lookup", verifier="greedy")
for name, run in {"most frequent": first, "last seen": mine, "prompt lookup": theirs}.items():
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
