"""Programs that are handed only what they read, so that timing one does not time the handing over of what it ignores.

A compiled program takes about a microsecond for each array among its arguments. A step that is a program of its own and
is given all weights and the whole cache, as the step inside a larger program is for nothing, would seem to cost that.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from specsparse.engine.pytree import Pytree


@dataclass(frozen=True)
class Pruned:
    """A compiled function of trees of arrays. Arguments that it only passes on never enter the program.

    Attributes:
        program: from the leaves that are read to the leaves that are computed.
        read: their places among the leaves of the arguments.
        passed: for each leaf of the result the place of the argument it is, or None where it is computed.
        structure: of the result.
    """

    program: Callable[..., list[jax.Array]]
    read: tuple[int, ...]
    passed: tuple[int | None, ...]
    structure: jax.tree_util.PyTreeDef

    @classmethod
    def compile(cls, function: Callable[..., Pytree], *args: Pytree, donate: tuple[int, ...] = ()) -> "Pruned":
        """For arguments of these shapes; those at the places `donate` are given up, as far as they are read."""
        from jax.extend.core import Literal, jaxpr_as_fun  # brings Pallas, which most runs do not need

        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        inputs = {var: place for place, var in enumerate(closed.jaxpr.invars)}
        results = closed.jaxpr.outvars
        passed = tuple(None if isinstance(var, Literal) else inputs.get(var) for var in results)
        used = {var for eqn in closed.jaxpr.eqns for var in eqn.invars if not isinstance(var, Literal)}
        read = tuple(place for var, place in inputs.items() if var in used)
        argument_of_leaf = [n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        given_up = [place for place, n in enumerate(argument_of_leaf) if n in donate and place not in passed]

        def computed(*leaves):
            known: list[jax.Array | None] = [None] * len(inputs)
            for place, leaf in zip(read, leaves, strict=True):
                known[place] = leaf
            out = jaxpr_as_fun(closed)(*known)
            return [leaf for leaf, place in zip(out, passed, strict=True) if place is None]

        leaves = jax.tree.leaves(args)
        jitted = jax.jit(computed, donate_argnums=[i for i, place in enumerate(read) if place in given_up])
        program = jitted.lower(*(leaves[place] for place in read)).compile()
        return cls(program, read, passed, jax.tree.structure(shape))

    def timed(self, *args: Pytree) -> tuple[Pytree, float]:
        """The result, ready, and the seconds of the program."""
        leaves = jax.tree.leaves(args)
        given = [leaves[place] for place in self.read]
        start = time.perf_counter()
        found = jax.block_until_ready(self.program(*given))
        seconds = time.perf_counter() - start
        computed = iter(found)
        out = [next(computed) if place is None else leaves[place] for place in self.passed]
        return jax.tree.unflatten(self.structure, out), seconds

    def __call__(self, *args: Pytree) -> Pytree:
        """The result."""
        return self.timed(*args)[0]


class Unpruned:
    """A function that the host steps through (two devices), timed as `Pruned` is; nothing is compiled around it."""

    def __init__(self, function: Callable[..., Pytree], *args: Pytree, donate: tuple[int, ...] = ()):
        self._function = function

    def timed(self, *args: Pytree) -> tuple[Pytree, float]:
        """The result, ready, and the seconds it took."""
        start = time.perf_counter()
        return jax.block_until_ready(self._function(*args)), time.perf_counter() - start
