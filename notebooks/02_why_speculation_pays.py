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
# # Why speculation pays here, or does not
#
# Two numbers decide: the rate at which drafted tokens are accepted (alpha), and the cost of checking n tokens in one
# pass instead of one, v(n). A GPU or CPU that waits for memory checks a few tokens at the cost of one. This notebook
# measures how many.

# %%
import os
import statistics
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import specsparse
from specsparse.engine.llama import Want
from specsparse.speculative import expected

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96"))
ROWS = (1, 2, 4, 6, 8) if TOKENS > 32 else (1, 4)
model = specsparse.load(MODEL)

# %% [markdown]
# ## v(n)
#
# The time of a pass of n tokens, in passes of one token. Medians of interleaved trials, so that a slow moment affects
# all alike.

# %%
capacity = model.capacity_for(64)
params, cache = model.params_for(capacity), model.new_cache(1, capacity)


@jax.jit
def forward(params, tokens, cache):
    return model.forward(params, tokens, cache, want=Want())[0].logits


def seconds(n: int) -> float:
    tokens = jnp.ones((1, n), jnp.int32)
    begun = time.perf_counter()
    forward(params, tokens, cache).block_until_ready()
    return time.perf_counter() - begun


for n in ROWS:
    seconds(n)  # compiles
turns = [{n: seconds(n) for n in ROWS} for _ in range(15)]
v = {n: statistics.median(turn[n] for turn in turns) / statistics.median(turn[1] for turn in turns) for n in ROWS}
print({n: round(cost, 2) for n, cost in v.items()})

# %% [markdown]
# ## alpha
#
# The share of tested draft tokens that were accepted.

# %%
prompt = "Say the alphabet three times. A B C D E F G, A B C D E F G,"
run = specsparse.generate(model, prompt, max_tokens=TOKENS, drafter="prompt_lookup", ignore_eos=True)
c = run.stats.counters
alpha = c.num_accepted_tokens / max(c.num_tested, 1)
print(f"alpha {alpha:.2f}: {c.num_accepted_tokens} of {c.num_tested} tested tokens stayed")

# %% [markdown]
# ## The predicted speed-up
#
# A round of gamma drafted tokens yields (1 - alpha^(gamma+1)) / (1 - alpha) tokens on average (Leviathan et al. 2023,
# eq. 1) and costs v(gamma+1) passes. Their ratio is the speed-up with a free drafter. Between measured n
# we interpolate linearly.

# %%


def cost(n: int) -> float:
    return float(jnp.interp(jnp.float32(n), jnp.array(ROWS, jnp.float32), jnp.array([v[r] for r in ROWS], jnp.float32)))


gammas = range(ROWS[-1])
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
left.plot(ROWS, [v[n] for n in ROWS], marker="o", label="measured")
left.plot(ROWS, ROWS, linestyle=":", color="gray", label="one by one")
left.set(xlabel="n", ylabel="v(n)", title="Cost of a pass")
left.legend(frameon=False)
for rate in (0.3, 0.5, 0.7, 0.9):
    right.plot(gammas, [expected.predicted_speedup(rate, g, cost) for g in gammas], marker="o", label=f"alpha {rate}")
right.axhline(1, color="gray", linewidth=1)
right.set(xlabel="gamma", ylabel="predicted speed-up", title="What it buys")
_ = right.legend(frameon=False)

# %%
gamma, gain = expected.best_gamma(alpha, cost, most=ROWS[-1] - 1)
print(f"this text, alpha {alpha:.2f}: draft {gamma} tokens for a speed-up of {gain:.2f} at best")
