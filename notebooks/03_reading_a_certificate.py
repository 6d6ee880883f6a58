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
# # Reading a certificate
#
# A verifier is *lossless* if the distribution of the text is the target's distribution p, for every draft distribution
# q. Samples cannot prove that. But on a small vocabulary every draft and every outcome of every coin can be enumerated,
# and the distribution of the output is compared with p exactly.

# %%
import numpy as np

import specsparse
from specsparse.speculative.proof.mutants import MUTANTS, measure_mutant
from specsparse.speculative.proof.results import LOSSLESS_TV, MUTANT_TV
from specsparse.speculative.verifiers import get_verifier

# %% [markdown]
# ## By hand, one token
#
# Rejection: accept a drafted x with chance min(1, p/q), otherwise draw from max(0, p - q), normalised
# (Leviathan et al. 2023, algorithm 1). The sum over all x and both outcomes of the coin is p.

# %%
p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
accept = np.minimum(1, p / q)
residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
out = q * accept + (q * (1 - accept)).sum() * residual
print(out)
assert np.allclose(out, p)

# %% [markdown]
# A real bug: the draft takes its *likeliest* token, and the verifier treats it as if it had been drawn from q. With p =
# q the coin always accepts, and the output is always the first token.

# %%
p = q = np.array([0.5, 0.3, 0.2])
first = np.eye(3)[q.argmax()]
wrong = first * np.minimum(1, p / q)
print(wrong, "total variation from p:", np.abs(wrong - p).sum() / 2)

# %% [markdown]
# ## By the package
#
# The package does the same with context-dependent p and q, drafts of several tokens and trees. It compares the joint
# distribution of all tokens of a round, so it also finds an error that shows only in the second token.

# %%
report = specsparse.certify([get_verifier("token"), get_verifier("typical")], vocab=3, gamma=2, mutants=False)
for name in ("token", "typical"):
    worst = report.worst(name)
    promise = "lossless" if worst.lossless else "lossy"
    print(f"{name:<8} {promise:<9} total variation {worst.tv:.1e} at worst, on: {worst.corner}")
assert report.passed

# %% [markdown]
# * **total variation**: half the sum of |difference| over all texts of a round; 0: the same distribution, 1: no text in
#   common.
# * **lossless** must be 0 up to the rounding of float64. *typical* is lossy, and its number is the size of the change.

# %%
print(f"lossless: at most {LOSSLESS_TV:.0e}; a mutant must show more than {MUTANT_TV:.0e}")

# %% [markdown]
# ## Does it find errors?
#
# A certificate that passes everything proves nothing. So errors that were really made elsewhere are kept as mutants,
# and the certificate must catch each of them.

# %%
for name in list(MUTANTS)[:2]:
    found = measure_mutant(name, seed=0)
    print(f"{found.name}: total variation {found.tv:.3f}; {found.mistake}")
    assert found.tv > MUTANT_TV

# %% [markdown]
# ## Your own verifier
#
# A verifier is a function of p, q, the drafts and uniforms. It returns the number of accepted drafts and the token
# after them. This one forgets the residual: after a rejection it draws from p itself. Every draft is enumerated, every
# uniform bisected, and the report names the texts with the largest errors. [certified.md](../certified.md) has real
# bugs with their sizes, and the verifiers of other libraries.


# %%
def forgets_the_residual(p, q, drafts, uniforms):
    accepted = 0
    while accepted < len(drafts) and uniforms[accepted] * q[accepted, drafts[accepted]] < p[accepted, drafts[accepted]]:
        accepted += 1
    return accepted, int((np.cumsum(p[accepted]) <= uniforms[-1] * p[accepted].sum()).sum())


report = specsparse.certify(forgets_the_residual, vocab=2, gamma=1)
worst = max(report.results, key=lambda result: result.tv)
print(f"total variation {worst.tv:.3f} on: {worst.corner}", *worst.differences(3), sep="\n")
assert not report.passed
