"""Drafters in plain Python: lists of token ids in and out, and no JAX."""

import abc
import dataclasses
import inspect
import itertools
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.engine.pytree import Pytree
from specsparse.errors import UserError, own_line
from specsparse.speculative.base import SHORT_GAMMA, Draft, DraftContext, Drafted, Drafter, DraftKind, MaxNodes
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.support.options import shown

_MOST_FAILURES = 256
_failures: dict[tuple["ListDrafter", bytes], str] = {}
"""By drafter and text, why no draft came. Compiled programs call whichever equal drafter they were compiled with."""


@dataclasses.dataclass(frozen=True)
class ListDrafter(Drafter):
    """Base of drafters in plain Python: derive a class and write `propose`; `drafter=mine:Mine` runs it.

    The compiled program calls `propose` for each text of a batch, in each round that may draft (`jax.pure_callback`).
    The time of these calls is that of the draft stage. Attributes with a type, such as `back: int = 2`, are options.

    Attributes:
        max_nodes: tokens drafted at most.
    """

    max_nodes: MaxNodes = SHORT_GAMMA
    kind = DraftKind.ONE_HOT

    def __init_subclass__(cls) -> None:
        """Makes each class a frozen dataclass, also one that only says `max_nodes = 8`."""
        if isinstance(vars(cls).get("max_nodes"), int):
            cls.__annotations__ = {"max_nodes": MaxNodes} | inspect.get_annotations(cls)
        dataclasses.dataclass(frozen=True)(cls)
        del cls.__setattr__, cls.__delattr__  # the base's hold: a class may still be decorated by its author

    @abc.abstractmethod
    def propose(self, tokens: list[int], limit: int) -> list[int]:
        """Tokens that may follow the text; any of them may be wrong.

        Args:
            tokens: prompt and output so far, ids of the target.
            limit: most tokens to propose, at least 1.

        Returns:
            At most `limit` ids, or [] for no draft. They depend on `tokens` and `limit` alone.
        """

    def draft(self, params: Pytree, state: Pytree, ctx: DraftContext) -> Drafted:
        batch, K = ctx.length.shape[0], self.max_nodes
        shapes = jax.ShapeDtypeStruct((batch, K), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)

        def propose(tokens_BC, length_B, budget_B) -> tuple[np.ndarray, np.ndarray]:
            return self._propose(ctx.vocab, *map(np.asarray, (tokens_BC, length_B, budget_B)))

        tokens_BK, count_B = jax.pure_callback(propose, shapes, ctx.tokens, ctx.length, ctx.budget)
        draft = Draft(tokens_BK, TreeTemplate.chain(K).parents_array(batch), jnp.maximum(count_B, 0))
        return Drafted(draft, state, ctx.cache, failed=count_B < 0)

    def _propose(
        self, vocab: int | None, tokens_BC: np.ndarray, length_B: np.ndarray, budget_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft int32[B, K] and its length int32[B], -1 if `propose` failed. On the host."""
        batch, K = len(length_B), self.max_nodes
        draft_BK, count_B = np.zeros((batch, K), np.int32), np.zeros(batch, np.int32)
        for b, limit in enumerate(np.minimum(budget_B, K).tolist()):
            if limit > 0:
                text = tokens_BC[b, : length_B[b]]
                try:
                    ids = self.checked(text.tolist(), limit, vocab)
                    draft_BK[b, : len(ids)], count_B[b] = ids, len(ids)
                except UserError as error:
                    if len(_failures) >= _MOST_FAILURES:
                        _failures.clear()
                    _failures[self, text.tobytes()], count_B[b] = str(error), -1
        return draft_BK, count_B

    def checked(self, tokens: list[int], limit: int, vocab: int | None) -> list[int]:
        """The ids that `propose` returns; UserError if it raises an error or returns anything else."""
        called = f"{type(self).__name__}.propose"
        try:
            found = self.propose(tokens, limit)
            ordered = isinstance(found, Iterable) and not isinstance(found, Set | Mapping)
            # A generator may raise too, or never end.
            given: list[Any] = list(itertools.islice(found, limit + 1)) if ordered else [None]
        except (Exception, SystemExit) as error:
            at = f" ({line})" if (line := own_line(error)) else ""
            raise UserError(f"{called} raised {type(error).__name__}: {shown(str(error))}{at}") from None
        try:
            ids = [operator.index(token) for token in given]
        except TypeError:
            ids = [-1]
        if len(ids) > limit or not all(0 <= token < (vocab or 2**31) for token in ids):
            what, last = "None" if found is None else shown(found), "" if vocab is None else f" to {vocab - 1}"
            raise UserError(f"{called} returned {what}: return a list of at most {limit} ids, 0{last}")
        return ids

    def failure(self, tokens: np.ndarray) -> str | None:
        return _failures.get((self, np.asarray(tokens, np.int32).tobytes()))
