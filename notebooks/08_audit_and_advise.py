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
# # Audit and advise
#
# Before you speculate, ask two questions. Does this engine write the same text with speculation as without? Would it be
# faster? `python -m specsparse audit` and `advise` answer them; this notebook uses the functions behind both.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

import specsparse
from specsparse.speculative import expected
from specsparse.support import terminal
from specsparse.tools.advise.advise import Question, advise, verdict
from specsparse.tools.audit import same_bits
from specsparse.tools.audit.texts import compare_texts
from specsparse.tools.peers.logits import CHECKED, OurRows, text_ids

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "48"))
SHIPPED = "SPECSPARSE_NOTEBOOK_MODEL" not in os.environ
DRAFT = "smollm2-draft" if SHIPPED else MODEL

# %% [markdown]
# ## Does a verification of n rows give the bits of one row?
#
# Plain decoding computes one row of logits at a time, a verification the rows of a whole draft together. If the sums of
# a row have another order in a batch, its last bits differ. If two tokens are then about equally likely, the text
# forks. So an audit computes the same rows with several widths and compares their bits. Widths with the same bits are a
# group; here there must be one.

# %%
plan = same_bits.AuditPlan(MODEL, widths=(1, 2, 4, 8, 16), windows=2, prompt_tokens=24, tokens=TOKENS)
(case,) = same_bits.run(plan, terminal.console())["cases"]


def show(found):
    """A line a group of widths."""
    for group in found["groups"]:
        rate = "{per_1000:.0f} in 1,000 ({low:.0f} to {high:.0f})".format(**group["fork_rate"])
        rows = f"{group['rows_differing']} of {group['positions']} rows have other bits"
        print(f"widths {group['widths']}: {rows}, by up to {group['largest_difference']:.2g}; forks {rate}")


print(case["engine"], case["weights"], "->", case["verdict"])
show(case)
assert case["verdict"] == same_bits.ONE_GROUP

# %% [markdown]
# No fork in so few rows would prove little: the interval says how often forks may still happen. Equal bits prove more.
# A row with the same bits always has the same most likely token.
#
# ## An engine that forks
#
# An engine is any object that writes a greedy text and returns rows of logits. This one is an example: it is ours, but
# in batches of four rows or more its logits are rounded to coarse steps.


# %%
class Coarse(OurRows):
    """Ours, rounded if the batch is wide."""

    def rows(self, prompt, text, width):
        exact = super().rows(prompt, text, width)
        step = np.float32(np.abs(exact).max() / 32)
        return exact if width < 4 else step * np.round(exact / step)


model = specsparse.load(MODEL)
ids, bos = text_ids(model.tokenizer, None), model.tokenizer.bos_id if model.tokenizer.add_bos else None
cut = same_bits.windows_of(ids, plan.windows, prompt=plan.prompt_tokens, following=plan.tokens, bos=bos)
forking = same_bits.audit(Coarse(model, plan.room), plan, cut, ids[:CHECKED])
print(forking["verdict"])
show(forking)

# %% [markdown]
# A flip is a row whose most likely token in a batch differs from the one alone. Its margin is the distance of the two
# likeliest tokens: forks happen if it is small.

# %%
flips = forking["groups"][1]["flips"]
for flip in flips[:4]:
    alone, batch = (model.tokenizer.decode([flip[key]]) for key in ("one_row", "batch"))
    print(
        f"{flip['window']}, row {flip['position']}: {alone!r} alone, {batch!r} in a batch; margin {flip['margin']:.3f}"
    )
assert forking["verdict"] == same_bits.FORKS

# %% [markdown]
# ## Two runs of any engine
#
# If only the texts are known, `audit diff A B` finds their first forks, from files with a line of token ids for each
# text. Here A is the text written one row at a time, and B ends where a verification of that engine would
# have written another token.

# %%
plain = {name: tuple(text) for name, text in forking["texts"].items()}
other = dict(plain)
for flip in reversed(flips):  # the first of each window is what stays
    name, row = flip["window"], flip["position"]
    other[name] = (*plain[name][: row + 1], flip["batch"])
difference = compare_texts(plain, other)
for fork in difference.forked:
    print(f"{fork.id}: token {fork.position} is {fork.a} in A and {fork.b} in B")
print(f"{len(difference.forked)} of {len(difference.forks)} texts fork; in 1,000 tokens: {difference.rate}")
assert len(difference.forked) == len({flip["window"] for flip in flips if flip["position"] + 1 < TOKENS})

# %% [markdown]
# Peers are audited by `python -m specsparse audit --engine specsparse,llama.cpp --threads 1,2`; [audit.md](../audit.md)
# has the results.
#
# ## Should I speculate at all?
#
# Advice needs only file headers: the bytes and operations of a token, the speed of a device, and the acceptance of
# drafts. Here both devices are given by figures, so this page is the same anywhere: two cores of a Xeon, measured once,
# and the data sheet of an H200. For your own machine, `HERE = "this"` measures forwards and drafts in half a minute and
# keeps the times.

# %%
HERE = "xeon2"
answers = [advise(Question(MODEL, (DRAFT,), device)) for device in (HERE, "h200")]
for found in answers:
    (size,) = found.cases
    clock = size.clocks.expected
    print(f"{found.device.title}: {1 / clock.step_s:,.0f} tok/s plainly, v(8) {clock.v(8):.2f}")
    for f in size.forecasts:
        least = "never" if f.break_even is None else f"{f.break_even:.2f}"
        known = f"{f.acceptance.alpha:.2f}" + " supposed" * (f.acceptance.source == "swept")
        print(
            f"    {f.candidate.name:<18} c {f.c:.2f}, break-even {least:>5}, acceptance {known}: {f.best.speedup:.2f}"
        )
    print("   ", verdict(size))

# %% [markdown]
# * **v(8)**: the time of a forward of eight rows in plain steps. **c**: the cost of a drafted token, or of a tree's
#   level.
# * **break-even**: the least acceptance at which some draft length is as fast as plain decoding. Copied drafts cost
#   nothing, so they need little; a draft model must win back its own passes.
#
# The same as a curve: predicted speed-up of the best length against the acceptance. It crosses 1 at the break-even.
# Here every round drafts; above, copied drafts are few if the text has nothing to copy.

# %%
alphas = np.linspace(0, 0.98, 50)
figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for axes, found in zip(panels, answers, strict=True):
    for name in ("prompt_lookup", DRAFT, "layer_skip"):
        f = next(f for f in found.cases[0].forecasts if f.candidate.name == name)
        steps = dict(enumerate(f.v, 1))
        lengths = [
            [expected.predicted_speedup(a, g, steps.get, c=f.c, c0=f.c0) for g in range(1, len(f.v))] for a in alphas
        ]
        (line,) = axes.plot(alphas, np.max(lengths, axis=1), label=name if name != MODEL else "itself")
        if f.break_even is not None:
            axes.plot(f.break_even, 1, "o", color=line.get_color())
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(title=found.device.title, xlabel="acceptance of a drafted token")
panels[0].set(ylabel="predicted speed-up", ylim=(0, 5))
_ = panels[0].legend()

# %% [markdown]
# On the command line, with intervals, memory, batches and contexts:
#
#     python -m specsparse advise smollm2-135m smollm2-draft --device h200 --batch 1,16
#     python -m specsparse.run +experiment=compare compare.advise=true     # the prediction beside the clock
