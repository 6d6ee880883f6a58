"""The distribution a model drafter draws from: its own temperature and truncation, never the target's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.noise import NoiseStream, token_uniforms
from specsparse.engine.sampling.params import SamplingParams, compile_params
from specsparse.engine.sampling.pipeline import RowPaths, target_probs
from specsparse.engine.sampling.probs import REFERENCE, SamplingKernels
from specsparse.errors import UserError
from specsparse.speculative.base import DraftContext

ALLOWED = ("temperature", "top_k", "top_p", "min_p")
"""Fields of `SamplingParams` that a draft has."""


@dataclasses.dataclass(frozen=True)
class DraftSampling:
    """From a drafter's logits to q and to tokens. Static.

    Attributes:
        sampling: temperature, top-k, top-p and min-p; the other fields keep their defaults.
        columns: N, logits of a row: the draft's vocabulary, trimmed or not.
        kernels: what argmax, distribution and draw run on.
    """

    sampling: SamplingParams
    columns: int
    kernels: SamplingKernels = REFERENCE

    def __post_init__(self):
        default = SamplingParams()
        for field in dataclasses.fields(SamplingParams):
            if field.name not in ALLOWED and getattr(self.sampling, field.name) != getattr(default, field.name):
                raise UserError(
                    f"drafter.{field.name} is no option of a draft's distribution: it has {', '.join(ALLOWED)}"
                )

    def probs(self, logits_RN: jax.Array) -> tuple[jax.Array, jax.Array]:
        """q float32[R, N] after temperature and truncation, and ok bool[R] (False: NaN, +inf or no token left)."""
        return self._probs(self.sampling, logits_RN)

    def confidence(self, logits_RN: jax.Array) -> jax.Array:
        """float32[R, N]: how sure the draft is of each token. q itself, or at temperature 0 the softmax at 1."""
        params = self.sampling.merged(temperature=1.0) if self.sampling.greedy else self.sampling
        return self._probs(params, logits_RN)[0]

    def top(self, logits_RN: jax.Array) -> jax.Array:
        """int32[R]: the argmax."""
        return self.kernels.argmax(logits_RN)

    def ranked(self, logits_RN: jax.Array, count: int) -> jax.Array:
        """int32[R, count]: the most likely columns in order, equal ones by index; by `count` passes, not by a sort."""
        row_R = jnp.arange(logits_RN.shape[0], dtype=jnp.int32)

        def step(i, carry):
            x_RN, found = carry
            index_R = self.kernels.argmax(x_RN)
            return x_RN.at[row_R, index_R].set(np.float32(-np.inf)), found.at[:, i].set(index_R)

        empty = jnp.zeros((logits_RN.shape[0], count), jnp.int32)
        return jax.lax.fori_loop(0, count, step, (logits_RN, empty))[1]

    def draw(self, q_RN: jax.Array, u_RU: jax.Array) -> jax.Array:
        """int32[R]: a column drawn from each row by inverse CDF; consumes the row's uniforms (see `draft_uniforms`)."""
        return self.kernels.draw(q_RN, u_RU)

    def propose(
        self, logits_RN: jax.Array, u_RU: jax.Array, ids_N: jax.Array | None, size: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`draw` of `probs`, whether that is one, and it over a larger vocabulary: int32[R], bool[R], float32[R, V].

        By kernels that have `propose`, in one call.

        Args:
            logits_RN: of the draft's columns.
            u_RU: as `draw`'s.
            ids_N: int32[N], the token of each column, None where column i is token i.
            size: V.
        """
        assert self.kernels.propose is not None
        truncation = compile_params(self.sampling, vocab_size=self.columns)[1].truncation
        truncation = jax.tree.map(jnp.asarray, truncation)
        return self.kernels.propose(logits_RN.astype(jnp.float32), truncation, u_RU, ids_N, size)

    def _probs(self, params: SamplingParams, logits_RN: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, arrays = compile_params(params, vocab_size=self.columns)
        R = logits_RN.shape[0]
        rows = RowPaths(jnp.zeros((R,), jnp.int32), jnp.zeros((R, 0), jnp.int32))
        return target_probs(config, arrays, logits_RN, None, rows, kernels=self.kernels)


def draft_uniforms(ctx: DraftContext, *, depth, node) -> jax.Array:
    """float32[B, n, 4] in [0, 1) of noise stream `draft`, to draw the tokens of n nodes by.

    Args:
        ctx: whose seed, sample and round key the noise.
        depth: int32, broadcasts to [B, n]: depth of the node, 1 for a child of the root.
        node: int32, broadcasts to [B, n]: index of the node.
    """
    return token_uniforms(
        ctx.seed[:, None],
        sample=ctx.sample[:, None],
        stream=NoiseStream.DRAFT,
        position=ctx.length[:, None] - 1 + depth,
        round=ctx.round[:, None],
        node=node,
    )
