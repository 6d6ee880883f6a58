import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specsparse.engine import noise
from specsparse.engine.noise import MAX_SAMPLE, NoiseStream, seed_at, seed_words

philox4x32, uniform, token_uniforms = map(jax.jit, (noise.philox4x32, noise.uniform, noise.token_uniforms))

# Counter, key, output: the `philox4x32 10` lines of Random123's kat_vectors.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return tuple(jnp.asarray(int(word, 16), jnp.uint32) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_known_answers(counter, key, output):
    assert [f"{int(word):08x}" for word in philox4x32(words(counter), words(key))] == output.split()


def oracle(counter, key):
    """Philox4x32-10 in Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b % 2**32, (a >> 32) ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def test_uniform_is_the_documented_function():
    """The definition other implementations are ported from, at random counters."""
    rng = np.random.default_rng(0)
    position, round, node = rng.integers(0, 2**31, (3, 50)).astype(np.int32)
    sample = rng.integers(0, MAX_SAMPLE, 50, endpoint=True).astype(np.int32)
    seed = 0x0123456789ABCDEF
    for stream in NoiseStream:
        use = {"sample": sample, "stream": int(stream), "position": position, "round": round, "node": node}
        u, four = (np.asarray(f(seed_words(seed), **use)) for f in (uniform, token_uniforms))
        assert u.dtype == four.dtype == np.float32
        for i in range(50):
            counter = (int(position[i]), int(round[i]), int(node[i]), 4 * int(sample[i]) + int(stream))
            wanted = [(word >> 8) / 2**24 for word in oracle(counter, (seed % 2**32, seed >> 32))]
            assert four[i].tolist() == wanted and u[i] == wanted[0]


def test_arguments_broadcast_and_trace():
    seed = jnp.asarray(np.stack([seed_words(1), seed_words(2)]))  # [2, 2]
    position = jnp.arange(3, dtype=jnp.int32)[None]
    u = uniform(seed[:, None], stream=int(NoiseStream.DRAFT), position=position, node=7)
    assert u.shape == (2, 3)
    direct = noise.uniform(seed_words(1), stream=NoiseStream.DRAFT, position=2, node=7)  # scalars, not traced
    assert direct.shape == () and direct == u[0, 2]
    other = uniform(seed_words(2), stream=int(NoiseStream.DRAFT), position=position[0], node=7)
    np.testing.assert_array_equal(u[1], other)


def test_uses_do_not_collide():
    """All combinations of small arguments give different noise (a collision of two uniforms by chance: 1e-3 a pair)."""
    uses = list(itertools.product(range(5), range(4), range(4), range(4), range(4)))
    sample, stream, position, round, node = np.asarray(uses, np.int32).T
    u = np.asarray(
        uniform(seed_words(5), sample=sample, stream=jnp.asarray(stream), position=position, round=round, node=node)
    )
    assert u.size - np.unique(u).size <= 3
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.1


def test_uniforms_are_uniform():
    u = np.asarray(uniform(seed_words(9), stream=int(NoiseStream.TARGET), position=np.arange(100_000, dtype=np.int32)))
    assert u.min() >= 0.0 and u.max() < 1.0
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    np.testing.assert_array_equal(u * 2**24, np.floor(u * 2**24))


def test_seed_words():
    np.testing.assert_array_equal(seed_words(2**32 + 5), np.array([5, 1], np.uint32))
    np.testing.assert_array_equal(seed_words(-1), np.array([2**32 - 1] * 2, np.uint32))
    assert seed_words(2**64 + 3).tolist() == seed_words(3).tolist()


def test_shared_noise_has_no_first_draw_of_two_prompts():
    """First uniforms of the prompts of a call are uncorrelated, and a place is no other seed's."""
    n = 4096
    seeds = [[seed_at(seed, place) for place in (0, 1, 2, "a")] for seed in range(n)]
    words = np.array([[seed_words(s) for s in row] for row in seeds])
    drawn = np.asarray(uniform(words, stream=NoiseStream.TARGET, position=5))
    assert np.abs(np.corrcoef(drawn.T) - np.eye(4)).max() < 5 / n**0.5
    assert len({s for row in seeds for s in row}) == 4 * n and max(map(max, seeds)) < 2**53
    assert seed_at(-1, 3) == seed_at(2**64 - 1, 3) and seed_at(7, 1) != seed_at(7, "1")
