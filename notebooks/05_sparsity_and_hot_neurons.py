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
# # Sparsity and hot neurons
#
# In a feed-forward network most neurons matter little for most tokens. A neuron that is not computed is not read from
# memory, and decoding waits for memory. Two questions follow: how many neurons can be left out, and are they always the
# same ones?

# %%
import os

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import specsparse
from specsparse.data import prompts
from specsparse.predictors import get_predictor
from specsparse.predictors.collect import collect, windows
from specsparse.predictors.evaluate import Evaluator, fit_layers

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
SMALL = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96")) <= 32
model = specsparse.load(MODEL)
texts = [model.tokenizer.encode(p.text) for p in prompts.load(tasks=["summarise"])]
cut = windows(texts, 32 if SMALL else 64)
fit_on, judge_on = cut[:2] if SMALL else cut[:12], cut[-1:] if SMALL else cut[-4:]

# %% [markdown]
# ## Leave out the small ones
#
# CATS (Lee et al. 2024): a neuron counts if its gate activation is large; the threshold of each layer is a quantile
# over a text. If all neurons are kept, the model is unchanged. With fewer, its distribution of the next token changes,
# as measured by the KL divergence. The method is lossy and labelled so.

# %%
judge, rows = Evaluator(model, judge_on), collect(model, fit_on)
shares, found = (0.5,) if SMALL else (0.7, 0.4), {}
for share in shares:
    predictor = get_predictor("gate_threshold", judge.ffn, share=share)
    found[share] = judge(predictor, fit_layers(predictor, model.params.layers, rows))
    quality = found[share].model
    print(
        f"keep {share:.0%}: KL {quality.kl:.4f}, perplexity {quality.perplexity_dense:.2f} -> {quality.perplexity:.2f}"
    )

# %%
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for share, one in found.items():
    axes.plot([layer.error for layer in one.layers], marker=".", label=f"keep {share:.0%}")
axes.set(xlabel="layer", ylabel="relative error of the FFN's output", ylim=(0, None))
_ = axes.legend(frameon=False)

# %% [markdown]
# ## Hot neurons
#
# How often is each neuron of a layer among those kept? If a few are always needed and many hardly ever, the few can be
# held in fast memory (PowerInfer's idea). With a flat curve, placement could not help.

# %%
layer = model.config.n_layers // 2
weights = model.params.layers[layer]
predictor = get_predictor("gate_threshold", judge.ffn, share=shares[-1])
threshold = predictor.fit(weights, jnp.asarray(rows[layer]))
count = jnp.asarray([rows.shape[1]], jnp.int32)
kept = np.asarray(predictor.keep(threshold, weights, jnp.asarray(rows[layer]), count))
often = np.sort(kept.mean(axis=0))[::-1]

figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.plot(np.arange(1, len(often) + 1) / len(often), often)
axes.axhline(shares[-1], linestyle=":", color="gray", label="were all alike")
axes.set(xlabel="neurons, the most often kept first", ylabel="share of tokens that keep it", title=f"layer {layer}")
_ = axes.legend(frameon=False)

# %%
top = often[: len(often) // 5].sum() / often.sum()
print(f"the hottest fifth of the neurons does {top:.0%} of what is kept; alike they would do 20%")
