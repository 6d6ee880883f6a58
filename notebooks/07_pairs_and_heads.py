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
# A smaller model can draft for a target, or a head that reads its hidden states. The catalogue has names for common
# pairs. The pairs of this notebook come with packages or are made here, so nothing is downloaded.

# %%
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import specsparse
from specsparse.models import catalogue
from specsparse.models.convert.heads import read_eagle3, write_folder
from specsparse.speculative.drafters.draft_model import common_tokens
from specsparse.testing import write_tiny_gguf
from specsparse.testing.drafting import random_eagle3

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96"))
SHIPPED = "SPECSPARSE_NOTEBOOK_MODEL" not in os.environ
DRAFT = "smollm2-draft" if SHIPPED else MODEL  # without a draft model the target drafts for itself: all is accepted

# %% [markdown]
# ## The names
#
# `python -m specsparse models` shows them with sizes and with what is on this machine.

# %%
for entry in catalogue.entries().values():
    if entry.drafts:
        print(f"{entry.name:<18} drafted for by {', '.join(entry.drafts)}")

# %% [markdown]
# ## One pair, by draft length and temperature
#
# `match` writes plain decoding's tokens at every temperature: the draft never changes the text. It changes the number
# of tokens that a pass of the target yields.

# %%
model = specsparse.load(MODEL)
prompt = "The three largest cities of Italy are"
found = {}
for heat in (0.0, 0.8):
    sampling = {"temperature": heat, "seed": 1, "max_tokens": TOKENS, "ignore_eos": True}
    plain = specsparse.generate(model, prompt, **sampling)
    for gamma in (1, 2, 4):
        drafter = specsparse.get_drafter("model", model=DRAFT, gamma=gamma)
        fast = specsparse.generate(model, prompt, drafter=drafter, verifier="match", **sampling)
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
# A head is one layer that reads hidden states which the target has computed already. So a drafted token costs less than
# one of a draft model. A head fits one target only.

# %%
if SHIPPED:
    plain = specsparse.generate(model, prompt, max_tokens=TOKENS)
    fast = specsparse.generate(model, prompt, max_tokens=TOKENS, drafter=specsparse.get_drafter("head", gamma=2))
    assert fast.token_ids == plain.token_ids
    counters = fast.stats.counters
    print(f"head: {counters.num_emitted_tokens / counters.num_rounds:.2f} tokens a pass")

# %% [markdown]
# ## A head that somebody published
#
# An EAGLE-3 head is a folder of two files, and reads three of the target's layers. Published ones belong to models of
# gigabytes (`python -m specsparse models` names some), so this one has random weights in the authors' form. Its drafts
# are almost always wrong, and the text is still plain decoding's.

# %%
folder = Path(tempfile.mkdtemp())
head = write_folder(random_eagle3(model), folder / "head")
file = read_eagle3(head)
print(f"{', '.join(sorted(p.name for p in head.iterdir()))}: reads what enters layers {file.layers}")

sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
plain = specsparse.generate(model, prompt, **sampling)
fast = specsparse.generate(model, prompt, drafter=specsparse.get_drafter("eagle3", path=str(head), gamma=2), **sampling)
assert fast.token_ids == plain.token_ids
print(f"{fast.stats.counters.num_accepted_tokens} of {fast.stats.counters.num_draft_tokens} drafted tokens accepted")

# %% [markdown]
# With a real one, on the command line:
#
#     python -m specsparse.run +experiment=eagle3_llama31_8b download=yes

# %% [markdown]
# ## Two vocabularies
#
# A draft model may have another tokenizer than the target. `tli` drafts the tokens that both have, by id; `slem` lets
# the draft write text and cuts that into the target's tokens (arXiv:2502.05202). Here the draft is a tiny random model
# with a SentencePiece vocabulary: almost nothing is accepted, and again no token differs.

# %%
draft = specsparse.load(write_tiny_gguf(folder / "draft.gguf", tokenizer="spm", vocab_size=600))
print(common_tokens(model, draft).sentence())
for vocabulary in ("tli", "slem"):
    drafter = specsparse.get_drafter("model", model=draft, vocabulary=vocabulary, gamma=2)
    fast = specsparse.generate(model, prompt, drafter=drafter, **sampling)
    assert fast.token_ids == plain.token_ids
    counters = fast.stats.counters
    print(f"{vocabulary}: {counters.num_accepted_tokens} of {counters.num_draft_tokens} drafted tokens accepted")

# %% [markdown]
# These commands compare two vocabularies without decoding, and run TinyLlama with SmolLM2-135M as its draft model:
#
#     python -m specsparse inspect TARGET --draft DRAFT
#     python -m specsparse.run +experiment=spec_two_vocabularies download=yes
