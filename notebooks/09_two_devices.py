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
# # Hot and cold neurons on two devices
#
# A model that does not fit a card is usually divided by layers: some on the card, the others on the host, which then
# limits the speed. In a ReLU model few neurons do most of the work. PowerInfer (Song et al. 2023) divides by neurons:
# the hot ones of every layer on the card, the cold ones on the host, both at the same time. Here a second CPU device
# stands for the card, to show the computation, the transfers and the waiting. The gain by a real card is predicted at
# the end, not measured.

# %%
import contextlib
import os
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

with contextlib.suppress(RuntimeError):  # if jax has begun with one device, both parts run on it, in two threads
    jax.config.update("jax_num_cpu_devices", 2)

import specsparse
from specsparse.data.devices import sheets
from specsparse.engine.prefill import chunk_rows
from specsparse.kernels.packing.dequant import dequantize
from specsparse.powerinfer.hot_cold import waiting
from specsparse.powerinfer.model_files import PredictorFile, to_powerinfer, write_predictors
from specsparse.powerinfer.placement import GpuIndex
from specsparse.predictors.collect import collect

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m-relu")
SMALL = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96")) <= 32
HOT, RANK, TOKENS = 0.25, 16 if SMALL else 192, 4 if SMALL else 32
dense = specsparse.load(MODEL)
config = dense.config
ids = dense.tokenizer.encode("The old bridge over the river was built by")

# %% [markdown]
# ## A predictor without training
#
# The FFN must know which neurons will fire before it reads them. PowerInfer's predictor is fc2 relu(fc1 x), against a
# threshold. The sign of a gate is that of G (norm * x), and a product of low rank comes close to it. Since relu(a) -
# relu(-a) = a, two copies of the factors, one of them negative, write that product down as PowerInfer's predictor.

# %%
predictors = []
for layer in dense.params.layers:
    gate_FD = np.asarray(dequantize(layer.ffn_gate)) * np.asarray(layer.ffn_norm)
    u_FK, s_K, v_KD = np.linalg.svd(gate_FD, full_matrices=False)
    left, right = (u_FK * s_K)[:, :RANK], v_KD[:RANK]
    fc1, fc2 = np.concatenate([right, -right]), np.concatenate([left, -left], axis=1)
    predictors.append(PredictorFile(fc1.astype(np.float16), fc2.astype(np.float16)))
print(f"{config.n_layers} predictors of rank {RANK}, {config.d_model} inputs, {config.d_ff} neurons a layer")

# %% [markdown]
# ## Which neurons are hot
#
# This counts over a text how often the predictor keeps each neuron. The more unequal the counts, the more of the work
# fits a small card.

# %%
text = (ids * 8)[: 32 if SMALL else 64]
rows_LND = np.asarray(collect(dense, np.asarray([text], np.int32))).reshape(config.n_layers, -1, config.d_model)
kept = []
for predictor, rows in zip(predictors, rows_LND, strict=True):
    h = np.maximum(rows @ predictor.fc1.astype(np.float32).T, 0)
    kept.append((h @ predictor.fc2.astype(np.float32).T >= 0).mean(axis=0))
count = round(HOT * config.d_ff)
hot = tuple(np.isin(np.arange(config.d_ff), np.argsort(-share)[:count]) for share in kept)
work = np.mean([share[mask].sum() / max(share.sum(), 1e-9) for share, mask in zip(kept, hot, strict=True)])
print(f"{np.mean(kept):.0%} of the neurons are kept; the hottest {HOT:.0%} are {work:.0%} of them")

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for i, share in enumerate(kept):
    ranked = np.cumsum(np.sort(share)[::-1]) / max(share.sum(), 1e-9)
    axes.plot(np.linspace(0, 1, len(ranked)), ranked, color=str(0.75 - 0.65 * i / len(kept)), lw=1)
axes.axvline(HOT, color="C1", ls=":")
axes.set(xlabel="neurons of a layer, the hottest first", ylabel="share of what is kept", ylim=(0, 1.02))
plt.show()

# %% [markdown]
# ## One device and two
#
# Both use the same file and the same placement. Attention, predictor and hot neurons run on device 0, cold neurons in a
# thread on device 1. Sums are added in one order on any device, so the tokens are the same. With a card, only
# `devices=("cuda:0", "cpu")` changes.

# %%
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.powerinfer.gguf"
write_predictors(folder.name, predictors)
to_powerinfer(dense.path, folder.name, path, threshold=0.0)
pair = ("cpu:0", "cpu:1") if len(jax.devices("cpu")) > 1 else ("cpu:0", "cpu:0")
placement = GpuIndex(hot, 0)
one = specsparse.load(path, placement=placement)
two = specsparse.load(path, placement=placement, devices=pair)
alone, shared = (specsparse.generate(model, ids, max_tokens=TOKENS, ignore_eos=True) for model in (one, two))
assert alone.token_ids == shared.token_ids
print(pair, shared.text)

# %% [markdown]
# ## Computation, transfers, waiting
#
# For each layer a row of D numbers and the mask of the cold neurons go to device 1, and a row of D comes back. That is
# little beside the weights. The cost is waiting: the sum needs both parts.

# %%
spans = []
before = dict(two.devices.crossed)
two.devices.watch = lambda *span: spans.append(span)
specsparse.generate(two, ids, max_tokens=2, ignore_eos=True)
two.devices.watch = None
rows = sum(chunk_rows(len(ids) - 1)) + 2  # of the prompt, padded to a chunk, and of two tokens
last = spans[-3 * config.n_layers :]  # the last token's
for side, seconds in waiting(last).items():
    kilobytes = (two.devices.crossed[side] - before[side]) / rows / 1e3
    print(
        f"the {side} side waits {1e3 * seconds:.3f} ms for the other's part of a token; {kilobytes:.1f} KB a row come"
    )

# %%
begin = min(start for _, _, start, _ in last)
figure, axes = plt.subplots(figsize=(7, 2.2), layout="constrained")
for part, layer, start, end in last:
    if layer < 6:
        row, colour = int(part == "cold"), {"attention": "0.7", "hot": "C1", "cold": "C0"}[part]
        axes.barh(row, 1e3 * (end - start), left=1e3 * (start - begin), color=colour, edgecolor="white")
axes.set(yticks=(0, 1), yticklabels=("attention, hot", "cold"), xlabel="ms, first layers of a token")
plt.show()

# %% [markdown]
# ## The gain by a card: predicted, not measured
#
# By the data sheets of an RTX 5090 and a 12-channel server at 80 % of their bandwidth: whole layers on a card that
# holds as many bytes, against hot neurons there and cold ones on the host at once, 20 us a layer for the way there and
# back.

# %%
devices = sheets()
card, host = (0.8 * devices[name].bandwidth for name in ("5090", "epyc12"))
ffn = 3 * 7e9 * 0.7 / 3 * 0.5625 / 32  # bytes of the FFN of a layer: a 7B model, two thirds of it FFNs, Q4_0
attention, active = ffn / 2, np.mean(kept)
hybrid = 32 * (attention / card + max(active * work * ffn / card, active * (1 - work) * ffn / host) + 20e-6)
on_card = (attention + HOT * ffn) / (attention + ffn)
layers = 32 * (attention + active * ffn) * (on_card / card + (1 - on_card) / host)
print(f"whole layers {1e3 * layers:.1f} ms a token, hot and cold {1e3 * hybrid:.1f} ms: {layers / hybrid:.1f} times")
folder.cleanup()
