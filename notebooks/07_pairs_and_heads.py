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
# # Pairs and heads
#
# A target is drafted for by a smaller model of its tokenizer, or by a head that reads its hidden states. The catalogue
# has names for the pairs that people run; here two that come with packages, so that nothing is downloaded.

# %%
import os

import matplotlib.pyplot as plt

import specsparse
from specsparse.models import entries

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96"))
SHIPPED = "SPECSPARSE_NOTEBOOK_MODEL" not in os.environ
DRAFT = "smollm2-draft" if SHIPPED else MODEL  # a model drafts for itself where there is no other: all is accepted

# %% [markdown]
# ## The names
#
# `python -m specsparse models` shows them with sizes and with what is on this machine.

# %%
for entry in entries.entries().values():
    if entry.drafts:
        print(f"{entry.name:<18} drafted for by {', '.join(entry.drafts)}")

# %% [markdown]
# ## One pair, by draft length and temperature
#
# `match` writes plain decoding's tokens at every temperature: the draft changes the time and never the text. What it
# changes is how many tokens a pass of the target yields.

# %%
model = specsparse.load(MODEL)
prompt = "The three largest cities of Italy are"
found = {}
for heat in (0.0, 0.8):
    law = {"temperature": heat, "seed": 1, "max_tokens": TOKENS, "ignore_eos": True}
    plain = specsparse.generate(model, prompt, **law)
    for gamma in (1, 2, 4):
        drafter = specsparse.get_drafter("model", model=DRAFT, gamma=gamma)
        fast = specsparse.generate(model, prompt, drafter=drafter, verifier="match", **law)
        assert fast.token_ids == plain.token_ids
        counters = fast.stats.counters
        found[heat, gamma] = counters.num_accepted_tokens / max(counters.num_draft_tokens, 1)
        print(f"T {heat:g}, {gamma} drafted: {found[heat, gamma]:.0%} accepted")

# %%
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
for heat in (0.0, 0.8):
    axes.plot([1, 2, 4], [found[heat, gamma] for gamma in (1, 2, 4)], marker="o", label=f"T {heat:g}")
axes.set(xlabel="tokens drafted in a round", ylabel="accepted / drafted", ylim=(0, 1.05))
_ = axes.legend()

# %% [markdown]
# For any other pair, with speed-ups and intervals, on the command line:
#
#     python -m specsparse.run -m +experiment=sweep_pairs model=llama-2-7b drafter.model=llama-160m download=yes
#     python -m specsparse report runs/sweep_pairs

# %% [markdown]
# ## A head
#
# A head has no layers of its own but one, and reads what the target computed anyway: a drafted token costs less than
# one of a draft model. It fits one target only.

# %%
if SHIPPED:
    plain = specsparse.generate(model, prompt, max_tokens=TOKENS)
    fast = specsparse.generate(model, prompt, max_tokens=TOKENS, drafter=specsparse.get_drafter("head", gamma=2))
    assert fast.token_ids == plain.token_ids
    counters = fast.stats.counters
    print(f"head: {counters.num_emitted_tokens / counters.num_rounds:.2f} tokens a pass")
