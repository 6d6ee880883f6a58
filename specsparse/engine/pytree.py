"""The type of trees of arrays."""

from typing import Any, TypeAlias

Pytree: TypeAlias = Any
"""Arrays in tuples, dicts and dataclasses, as jax takes them: weights, states, results. Python has no type for it."""
