"""The target's rows at the tokens of texts, computed anew each time they are read: kept, they would be a thousand times
larger than the texts."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from specsparse.engine.cache import KVCache
from specsparse.engine.llama import Want
from specsparse.engine.model import Model
from specsparse.training.data import Text

_BATCH, _STEP = 8, 128
"""Texts of a forward pass, and what its length is a multiple of: few shapes, so that few programs are compiled."""


class Features:
    """Reads texts with a target.

    Args:
        model: the target.
        layers: ids of layers; the rows are those of the residual stream that enter them, not normalised. The number of
            layers stands for the rows before the output norm.
    """

    def __init__(self, model: Model, layers: Sequence[int]):
        self.model, self.layers = model, tuple(layers)
        want = Want(logits="none", hidden=self.layers)

        def rows(params, tokens_Bn, count_B, cache: KVCache):
            return model.forward(params, tokens_Bn, cache, n_valid_B=count_B, want=want)[0].hidden

        self._rows = model.devices.jit(rows)

    def of(self, texts: Sequence[Text]) -> list[Text]:
        """The texts with float32[n, len(layers) D], the rows of one layer after those of another."""
        out: list[Text] = list(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        for start in range(0, len(order), _BATCH):
            group = order[start : start + _BATCH]
            length = -(-len(texts[group[-1]].tokens) // _STEP) * _STEP
            tokens, count = np.zeros((_BATCH, length), np.int32), np.zeros(_BATCH, np.int32)
            for b, i in enumerate(group):
                count[b] = len(texts[i].tokens)
                tokens[b, : count[b]] = texts[i].tokens
            capacity = self.model.capacity_for(length)
            cache = self.model.new_cache(_BATCH, capacity)
            args = self.model.everywhere((tokens, count, cache))
            found = np.asarray(jax.block_until_ready(self._rows(self.model.params_for(capacity), *args)))
            for b, i in enumerate(group):
                out[i] = replace(texts[i], hidden=found[b, : count[b]])
        return out
