"""A pruned program gives what the function gives, and is handed no more than it reads."""

import jax
import jax.numpy as jnp
import numpy as np

from specsparse.runtime.loops import Pruned


def swap(weights, state, extra):
    """Reads one weight and one array of the state, passes the rest on, and adds a constant."""
    return {"sum": weights["a"] + state[0], "kept": state[1], "again": state[1], "constant": jnp.ones(2)}, extra


def arguments():
    weights = {"a": jnp.arange(3.0), "unread": jnp.zeros(1000)}
    return weights, (jnp.ones(3), jnp.arange(5)), jnp.zeros(4)


def test_the_result_is_the_functions():
    args = arguments()
    wanted, found = swap(*args), Pruned.compile(swap, *args).timed(*args)[0]
    assert jax.tree.structure(wanted) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_what_is_read_enters_and_what_is_passed_on_stays():
    args = arguments()
    pruned = Pruned.compile(swap, *args)
    assert pruned.read == (0, 2)  # a and state[0]
    out, seconds = pruned.timed(*args)
    assert out[0]["kept"] is args[1][1] and out[0]["again"] is args[1][1] and out[1] is args[2]
    assert seconds > 0


def test_a_given_up_argument_is_used_up_where_it_is_read_and_kept_where_it_is_passed_on():
    def grow(state, other):
        return state[0] + 1.0, state[1], other * 2.0

    args = (jnp.zeros(8), jnp.ones(8)), jnp.ones(8)
    pruned = Pruned.compile(grow, *args, donate=(0,))
    out, _ = pruned.timed(*args)
    assert args[0][0].is_deleted()
    assert not args[0][1].is_deleted() and out[1] is args[0][1] and not args[1].is_deleted()
    np.testing.assert_array_equal(out[0], np.ones(8))
