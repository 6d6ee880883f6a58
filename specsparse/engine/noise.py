"""Counter-based uniform noise: a number is a function of its use, never of how many were drawn before.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011). The
key is the 64-bit seed and the counter is

    (position, round, node, 4 * sample + stream)

so distinct uses have distinct counters and, the cipher being a bijection for each key, independent noise. Only integer
operations are used: every device and every implementation gives the same bits.
"""

import enum
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

_ROUNDS = 10
_MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))

MAX_SAMPLE = 2**30 - 1
"""The largest sample index: two bits of its counter word name the stream."""


class NoiseStream(enum.IntEnum):
    """The use of a uniform. TARGET noise belongs to a position alone: pass round 0 and node 0 (contract C1)."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def seed_words(seed: int) -> np.ndarray:
    """The two key words uint32[2] of a seed, low word first; seeds are taken modulo 2^64."""
    seed = int(seed) % 2**64
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def seed_at(seed: int, place: int | str) -> int:
    """The seed of one of several prompts that share `seed`, so that their noise is independent.

    Args:
        seed: the one seed that the caller gave.
        place: of the prompt in its list, or its name. Place 0 has `seed` itself: a prompt alone and the first of a list
            have the same noise.

    Returns:
        53 bits of a hash, which JSON's readers keep exactly; two of a million prompts share one with a chance of 6e-5.
    """
    if place == 0:
        return seed
    digest = hashlib.blake2b(f"{int(seed) % 2**64} {place!r}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


def _high_word(a: np.uint32, b: jax.Array) -> jax.Array:
    """The high word of the 64-bit product: 64-bit integers are off by default in jax."""
    if jax.device_count() == 1:
        return jax.lax.mulhi(jnp.full(jnp.shape(b), a), b)
    # From 16-bit halves, which compile three times as long: jaxlib 0.10.2 divides no program with mulhi among devices.
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_low, a_high = a & mask, a >> half
    b_low, b_high = b & mask, b >> half
    mid = b_high * a_low + (b_low * a_low >> half)  # at most (2^16 - 1)^2 + 2^16 - 1: no overflow
    cross = b_low * a_high + (mid & mask)
    return b_high * a_high + (mid >> half) + (cross >> half)


@jax.jit  # its operations are traced once for a shape, and not at every use
def philox4x32(counter: tuple[jax.Array, ...], key: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Philox4x32-10 of four counter words under two key words; all uint32 of one shape (or scalars)."""
    # Tied to the counter: in a loop the key is invariant, and XLA would hoist its schedule, one kernel for each sum.
    (c0, c1, c2, c3), (k0, k1) = jax.lax.optimization_barrier((counter, key))
    m0, m1 = _MULTIPLIERS
    for _ in range(_ROUNDS):
        high0, low0 = _high_word(m0, c0), c0 * m0
        high1, low1 = _high_word(m1, c2), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1, c2, c3


def token_uniforms(seed, *, sample=0, stream: NoiseStream | jax.Array, position, round=0, node=0) -> jax.Array:
    """Four independent uniforms for each use, multiples of 2^-24 in [0, 1): one token is drawn by them.

    They are the four words of one call of the generator, so they cost as much as one. `sampling.probs.reference_draw`
    says which decision each of them makes.

    Args:
        seed: uint32[..., 2], words as `seed_words` gives them.
        sample: int, which of the sequences that share a seed, 0 to MAX_SAMPLE.
        stream: the use of the numbers.
        position: int, absolute position of the token that is decided.
        round: int, verification round.
        node: int, node of the draft tree.

    Returns:
        float32[..., 4], `...` being the common shape of the integer arguments and `seed[..., 0]`; they broadcast
        against each other.
    """
    seed = jnp.asarray(seed, jnp.uint32)
    words = [jnp.asarray(word).astype(jnp.uint32) for word in (position, round, node, sample, stream)]
    shape = jnp.broadcast_shapes(seed.shape[:-1], *(word.shape for word in words))
    position, round, node, sample, stream = (jnp.broadcast_to(word, shape) for word in words)
    key = (jnp.broadcast_to(seed[..., 0], shape), jnp.broadcast_to(seed[..., 1], shape))
    bits = jnp.stack(philox4x32((position, round, node, (sample << np.uint32(2)) | stream), key), axis=-1)
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def uniform(seed, **use) -> jax.Array:
    """One uniform for each use, the first of its `token_uniforms`: for a coin. Arguments as there; float32[...]."""
    return token_uniforms(seed, **use)[..., 0]
