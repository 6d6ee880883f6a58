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
# # A first decode
#
# One model decodes one prompt plainly and speculatively. The two texts are the same, token for token; the numbers of
# passes of the model differ.

# %%
import os

import specsparse
from specsparse.runtime import metrics

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")  # or the path of a GGUF file
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96"))

model = specsparse.load(MODEL)
question = "Repeat this list, then add two more: apples, pears, plums, apples, pears, plums, apples, pears, plums."
chat = [{"role": "user", "content": question}]

# %% [markdown]
# ## Plain decoding
#
# Plain decoding takes a pass of the model for every token.

# %%
plain = specsparse.generate(model, chat, max_tokens=TOKENS)
print(plain.text)
print(f"\n{len(plain.token_ids)} tokens in {plain.stats.counters.num_rounds} passes")

# %% [markdown]
# ## Speculative decoding
#
# Prompt lookup finds the last few tokens earlier in the text and guesses that the same tokens follow again. The model
# then checks the whole guess in one pass. `greedy` keeps the tokens that the model itself would have written, so the
# text cannot change.

# %%
fast = specsparse.generate(model, chat, max_tokens=TOKENS, drafter="prompt_lookup", verifier="greedy")
assert fast.token_ids == plain.token_ids
counters = fast.stats.counters
print(f"{counters.num_emitted_tokens} tokens in {counters.num_rounds} passes: the same text")

# %% [markdown]
# ## The numbers
#
# Counters first, then rates; each rate has one definition.

# %%
for name, value in metrics.rates(counters).items():
    if isinstance(value, float):
        print(f"{name:<26}{value:8.3f}   {metrics.DEFINITIONS[name]}")
print("accepted at position      ", [round(a, 2) for a in metrics.rates(counters)["acceptance_per_position"]])

# %% [markdown]
# At a temperature above 0 the verifier `match` keeps the same promise. The noise depends on the position, not on the
# pass, so both write the same text for the same seed.

# %%
sampling = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 7}
sampled = specsparse.generate(model, chat, **sampling)
matched = specsparse.generate(model, chat, drafter="prompt_lookup", verifier="match", **sampling)
assert sampled.token_ids == matched.token_ids
print(matched.text)
