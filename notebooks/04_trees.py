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
# # Trees
#
# A chain drafts one continuation. A tree drafts several, and the target checks them in the same pass: each node attends
# to its own ancestors only. The accepted tokens are one path from the root.

# %%
import os

import matplotlib.pyplot as plt

import specsparse
from specsparse.speculative.expected import expected_tokens_tree
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.template import TreeTemplate

MODEL = os.environ.get("SPECSPARSE_NOTEBOOK_MODEL", "smollm2-135m")
TOKENS = int(os.environ.get("SPECSPARSE_NOTEBOOK_TOKENS", "96"))

# %% [markdown]
# ## A template
#
# Node i has a parent before it; -1 is the last token of the text. `kary((3, 2, 1))`: three guesses for the next token,
# two after each, one after those.

# %%
tree = TreeTemplate.kary((3, 2, 1))
print(tree.size, "nodes, parents", tree.parents)
print("path to the last node:", tree.path(tree.size - 1))


def draw(axes, tree, title):
    """Each node under its parent, siblings side by side."""
    depths = tree.depths
    across, by_depth = {-1: 0.0}, {}
    for node, depth in enumerate(depths):
        by_depth.setdefault(depth, []).append(node)
    for depth in sorted(by_depth):
        for place, node in enumerate(by_depth[depth]):
            across[node] = place - (len(by_depth[depth]) - 1) / 2
    level = {-1: min(depths) - 1, **dict(enumerate(depths))}
    for node, parent in enumerate(tree.parents):
        ends = [across[parent], across[node]], [-level[parent], -level[node]]
        axes.plot(*ends, color="#8a8a8a", linewidth=1, zorder=1)
    axes.scatter(
        list(across.values()), [-level[n] for n in across], s=90, c=["#D55E00"] + ["#0072B2"] * tree.size, zorder=2
    )
    axes.set_title(title, loc="left")
    axes.set_axis_off()


# %% [markdown]
# ## The best shape
#
# Sequoia (Chen et al. 2024) measures how often the target takes the likeliest child, the second likeliest and so on,
# and the cost of a pass of n nodes. Dynamic programming then finds the shape with the most tokens per time. In this
# example ten nodes cost no more than one, as on a machine that waits for memory. One draft is often right, the other
# rarely.

# %%
sure, unsure = (0.8, 0.1, 0.04, 0.02), (0.35, 0.2, 0.12, 0.08)
shapes = {
    rates: get_tree("sequoia", acceptance=rates, cost=[1.0] * 11, nodes=10, depth=6).template
    for rates in (sure, unsure)
}
figure, panels = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
draw(panels[0], tree, "kary (3, 2, 1)")
draw(panels[1], shapes[sure], "Sequoia, a sure draft")
draw(panels[2], shapes[unsure], "Sequoia, an unsure draft")

# %%
for name, rates in {"sure": sure, "unsure": unsure}.items():
    for shape, template in {
        "its own": shapes[rates],
        "a chain of as many": TreeTemplate.chain(shapes[rates].size),
    }.items():
        reach = [rates[rank] if rank < len(rates) else 0 for rank in template.ranks]
        tokens = expected_tokens_tree(template.parents, reach)
        print(f"{name:<7} {shape:<19} {template.size:>2} nodes: {tokens:.2f} tokens a round")

# %% [markdown]
# The trees were limited to six levels (`depth=6`). For the draft that is often right, the chain of ten goes deeper and
# yields more: depth is worth more than width. For the other draft, width is worth more.

# %% [markdown]
# ## On a model
#
# Some of the target's own layers draft, and the whole target verifies. The text is plain decoding's for every shape.
# The draft is untrained, so this shows the mechanism, not a gain.

# %%
model = specsparse.load(MODEL)
prompt = "The three largest cities of Italy are"
plain = specsparse.generate(model, prompt, max_tokens=TOKENS)
for name, shape in {"chain of 3": None, "kary (3, 2)": get_tree("static", widths=(3, 2))}.items():
    drafter = specsparse.get_drafter("layer_skip", **({"gamma": 3} if shape is None else {"tree": shape}))
    fast = specsparse.generate(model, prompt, max_tokens=TOKENS, drafter=drafter)
    assert fast.token_ids == plain.token_ids
    c = fast.stats.counters
    print(f"{name:<12} {c.num_emitted_tokens / c.num_rounds:.2f} tokens a pass, {c.num_draft_tokens} nodes drafted")
