"""Types of arrays, and of trees of them."""

from typing import Any, TypeAlias

Pytree: TypeAlias = Any
"""Arrays in tuples, dicts and dataclasses, as jax takes them: weights, states, results. Python has no type for it."""
AnyArray: TypeAlias = Any
"""An array of jax, or of numpy on the host."""
ABSENT: Any = None
"""In the place of arrays that a program does not read."""
