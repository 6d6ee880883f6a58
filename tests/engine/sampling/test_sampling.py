"""Distributions against a sort-based float64 oracle, and contract C1: a row's bits depend on nothing but the row."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.params import SamplingParams, Truncation, compile_params
from specsparse.engine.sampling.probs import REFERENCE
from tests.cells import cells

SHAPES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.01},
    {"temperature": 0.7},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40, "temperature": 0.8},
    {"top_p": 1e-40},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 1.5},
    {"top_p": 0.999},
    {"min_p": 1.0},
    {"min_p": 0.3},
    {"min_p": 1e-4, "temperature": 2.0},
    {"top_k": 4, "top_p": 0.6},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.02, "temperature": 0.9},
    {"top_k": 5, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.05, "temperature": 3.0},
]

probs = jax.jit(pipeline.target_probs, static_argnums=0, static_argnames="kernels")
target_logits = jax.jit(pipeline.target_logits, static_argnums=0)
draw = jax.jit(REFERENCE.draw)
sample = jax.jit(pipeline.sample, static_argnums=0)
tree_rows = jax.jit(pipeline.tree_rows, static_argnames="depth")


@jax.jit
def observe(history, token_B):
    return pipeline.observe_many(history, token_B[:, None], jnp.ones_like(token_B))


def oracle_probs(x, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of one row by sorting, in float64, and whether top-p decides by a margin float32 cannot see."""
    x = np.asarray(x, np.float64)
    if temperature == 0.0:
        return (np.arange(len(x)) == np.argmax(x)).astype(np.float64), False
    e = np.exp((x - x.max()) / temperature)
    keep = (x > -np.inf) & (e >= min_p)
    if 0 < top_k < keep.sum():
        keep &= x >= np.sort(x[keep])[-top_k]
    close = False
    if top_p < 1.0:
        values = np.unique(x[keep])[::-1]
        weight = np.array([e[keep & (x == value)].sum() for value in values]) if len(values) < 200 else None
        if weight is None:  # hardly any ties: group by sorting once
            order = np.argsort(-x[keep], kind="stable")
            weight = np.add.reduceat(e[keep][order], np.searchsorted(-x[keep][order], -values))
        share = np.cumsum(weight) / weight.sum()
        close = bool(np.any(np.abs(share - top_p) < 1e-6)) and top_p > 1e-3
        keep &= x >= values[np.argmax(share >= top_p)]
    p = np.where(keep, e, 0.0)
    return p / p.sum(), close


def random_logits(rng, rows, vocab):
    """Smooth rows, rows full of ties, rows with banned tokens, and a flat row."""
    x = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    x[1::4] = np.round(x[1::4] * 2) / 2
    x[2::4][rng.random((len(x[2::4]), vocab)) < 0.3] = -np.inf
    x[2::4, vocab // 2] = 1.0
    x[-1] = 0.25
    return x


@pytest.mark.parametrize(("vocab", "repeats"), [(5, 8), (100, 4), (8193, 1), (49152, 1)])
def test_distribution_equals_the_sorting_oracle(vocab, repeats):
    shapes = (SHAPES if vocab < 10_000 else SHAPES[1::3]) * repeats
    rng = np.random.default_rng(vocab)
    x = random_logits(rng, len(shapes), vocab)[rng.permutation(len(shapes))]
    cfg, params = compile_params([SamplingParams(**shape) for shape in shapes], vocab_size=vocab)
    p, ok = probs(cfg, params, x)
    assert p.dtype == jnp.float32 and np.all(ok)
    skipped = 0
    for got, row, shape in zip(np.asarray(p), x, shapes, strict=True):
        want, close = oracle_probs(row, **shape)
        skipped += close
        if not close:
            assert np.array_equal(got > 0, want > 1e-37), shape
            np.testing.assert_allclose(got, want, rtol=5e-5, atol=1e-9, err_msg=str(shape))
        assert abs(float(got.astype(np.float64).sum()) - 1.0) < 2e-6
    assert skipped <= 0.2 * len(shapes)


@settings(max_examples=150)
@given(
    st.lists(st.integers(-8, 8) | st.just(None), min_size=7, max_size=7).filter(any),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.integers(0, 8),
    st.sampled_from([0.01, 0.35, 0.72, 0.93, 1.0]),
    st.sampled_from([0.0, 0.017, 0.21, 0.83, 1.0]),
)
def test_any_combination_of_truncations(values, temperature, top_k, top_p, min_p):
    x = np.array([-np.inf if value is None else value / 4 for value in values], np.float32)
    want, close = oracle_probs(x, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with np.errstate(divide="ignore"):
        numbers = [temperature, np.log(min_p), top_k or 7, top_p]
    rows = Truncation(*(np.array([a], d) for a, d in zip(numbers, ("f4", "f4", "i4", "f4"), strict=True)))
    got = np.asarray(reference_probs(x[None], rows))[0]
    if not close:
        assert np.array_equal(got > 0, want > 0)
        np.testing.assert_allclose(got, want, rtol=2e-5)


reference_probs = jax.jit(REFERENCE.probs)


def test_ties_at_the_threshold_are_kept_and_greedy_takes_the_first():
    x = np.array([[0.0, 2.0, 2.0, -1.0, 2.0]], np.float32)
    cfg, params = compile_params(SamplingParams(top_k=1), vocab_size=5)
    np.testing.assert_allclose(probs(cfg, params, x)[0], [[0, 1 / 3, 1 / 3, 0, 1 / 3]], rtol=1e-6)
    cfg, params = compile_params(SamplingParams(temperature=0), vocab_size=5)
    np.testing.assert_array_equal(probs(cfg, params, x)[0], [[0, 1, 0, 0, 0]])
    assert sample(cfg, params, x, u_RU=None)[0].tolist() == [1]
    zeros = np.array([[-0.0, 0.0, -1.0]], np.float32)
    cfg, params = compile_params(SamplingParams(top_k=1), vocab_size=3)
    np.testing.assert_array_equal(probs(cfg, params, zeros)[0], [[0.5, 0.5, 0]])


def test_rows_without_a_distribution_are_flagged_and_harmless():
    nan, inf = np.nan, np.inf
    x = np.array([[1, 2, 3], [nan, 2, 1], [nan] * 3, [-inf] * 3, [1, inf, 0], [-inf, 0, -inf]], np.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, top_p=0.9, top_k=2)
        cfg, arrays = compile_params(params, vocab_size=3, batch=6)
        p, ok = probs(cfg, arrays, x)
        assert ok.tolist() == [True, False, False, False, False, True]
        assert np.isfinite(p).all() and np.allclose(p.sum(axis=1), 1.0)
        token, ok, _ = sample(cfg, arrays, x, u_RU=np.full((6, 4), 0.999, np.float32))
        assert ok.tolist() == [True, False, False, False, False, True]
        assert np.all(token >= 0) and np.all(token < 3) and token[2] == 0 and token[3] == 0 and token[5] == 1


def oracle_penalties(x, prompt, output, presence, frequency, repetition):
    x = np.array(x, np.float64)
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= presence + frequency * output.count(token)
    return x


def test_penalties_are_those_of_the_definitions():
    rng = np.random.default_rng(3)
    vocab, prompt, output = 30, [1, 2, 2, 7], [7, 9, 9, 9, 4]
    x = rng.normal(size=(4, vocab)).astype(np.float32) * 3
    x[:, 2] = -np.inf
    numbers = [(0.0, 0.0, 1.3), (0.7, 0.0, 1.0), (0.0, -0.4, 1.0), (-1.1, 0.3, 0.8)]
    each = [SamplingParams(presence_penalty=a, frequency_penalty=b, repetition_penalty=c) for a, b, c in numbers]
    cfg, params = compile_params(each, vocab_size=vocab)
    history = pipeline.init_history(cfg, [prompt] * 4)
    for token in output:
        history = observe(history, jnp.full((4,), token, jnp.int32))
    got, ok = target_logits(cfg, params, x, history)
    assert np.all(ok)
    for row, logits, number in zip(np.asarray(got), x, numbers, strict=True):
        np.testing.assert_allclose(row, oracle_penalties(logits, prompt, output, *number), rtol=2e-6, atol=1e-6)


def everything(vocab, processor, **more):
    """Parameters that use every step."""
    return SamplingParams(
        temperature=0.8, top_k=60, top_p=0.97, min_p=0.001, presence_penalty=0.2, frequency_penalty=0.15,
        repetition_penalty=1.2, logit_bias={0: 1.0, 3: -2.0}, bad_words=["x"], min_tokens=4, max_tokens=8,
        stop_token_ids=[5], logits_processors=[processor], **more,
    )  # fmt: skip


def ban_repeats(ids, logits):
    """Lowers the newest output token."""
    return jnp.where(jnp.arange(logits.shape[0], dtype=jnp.int32) == ids[-1], logits - jnp.float32(3.0), logits)


def test_rows_of_a_draft_equal_plain_decoding_bit_for_bit():
    """C1 with penalties, bad words, minimum length and processors: the draft prefix acts as if it had been emitted."""
    vocab, batch, n = 100, 2, 6
    rng = np.random.default_rng(4)
    params = everything(vocab, ban_repeats)
    cfg, arrays = compile_params(params, vocab_size=vocab, batch=batch, encode=lambda text: [7, 8, 9])
    assert cfg.bad_prefix == 2
    token = jnp.asarray([[1, 7, 8, 9, 7, 8], [7, 8, 7, 8, 2, 2]], jnp.int32)
    x = rng.normal(size=(batch, n, vocab)).astype(np.float32) * 3
    u = rng.random((batch, n, 4)).astype(np.float32)
    start = pipeline.init_history(cfg, [[1, 2, 3], [4, 7]])
    start = observe(start, token[:, 0])
    parents = jnp.asarray([[-1, 0, 1, 2, 3, 4]] * batch, jnp.int32)
    histories = [start]
    for i in range(1, n):
        histories.append(observe(histories[-1], token[:, i]))

    @jax.jit
    def run(x, history, rows, u):
        processed, ok = pipeline.target_logits(cfg, arrays, x, history, rows)
        p, _ = pipeline.target_probs(cfg, arrays, x, history, rows)
        return jnp.where(ok[:, None], processed, jnp.float32(np.nan)), p, REFERENCE.draw(p, u)

    for rows in (pipeline.chain_rows(token), tree_rows(token, parents, depth=n - 1)):
        together = [np.asarray(a) for a in run(x.reshape(-1, vocab), start, rows, u.reshape(-1, 4))]
        processed, p, tokens = (a.reshape(batch, n, *a.shape[1:]) for a in together)
        for i, history in enumerate(histories):
            for many, alone in zip((processed, p, tokens), run(x[:, i], history, None, u[:, i]), strict=True):
                np.testing.assert_array_equal(many[:, i], alone)
    assert p[0, 2, 9] == 0.0 and p[1, 1, 9] == 0.0 and p[1, 3, 9] == 0.0  # after 7, 8
    assert np.isneginf(processed[:, :3, 5]).all() and np.isfinite(processed[:, 3:, 5]).all()  # min_tokens=4
    assert np.isfinite(processed[0, 1, 9]) and np.isneginf(processed[0, 2, 9])


@pytest.mark.parametrize("vocab", cells([8193, 49152], [8193]))
def test_rows_do_not_depend_on_their_number(vocab):
    """C1: R = 1 and R = 9 give the same bits, also where a row does not fill whole vectors."""
    rng = np.random.default_rng(vocab)
    x = random_logits(rng, 9, vocab)
    u = rng.random((9, 4)).astype(np.float32)
    params = everything(vocab, ban_repeats, logprobs=3)
    cfg, arrays = compile_params(params, vocab_size=vocab, encode=lambda text: [7, 8])
    history = observe(pipeline.init_history(cfg, [[3, 4]]), jnp.asarray([7], jnp.int32))
    path = np.array([[3, -1], [7, -1], [-1, -1]] * 3, np.int32)

    @jax.jit
    def run(x, u, path):
        rows = pipeline.RowPaths(jnp.zeros((x.shape[0],), jnp.int32), path)
        p, _ = pipeline.target_probs(cfg, arrays, x, history, rows)
        token = REFERENCE.draw(p, u)
        return p, token, pipeline.logprobs(x, token, 3)

    together = run(x, u, path)
    for i in range(9):
        alone = run(x[i : i + 1], u[i : i + 1], path[i : i + 1])
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i : i + 1], b), together, alone)


def test_draw_has_exactly_the_distribution_on_a_dyadic_grid():
    """Every u of a grid, probabilities that are multiples of its step: counts are exact, in order of the vocabulary.

    Over 2^16 tokens each of the four uniforms decides among 16: uniform i among tokens that lie 16^i apart.
    """
    rng = np.random.default_rng(6)
    share = rng.multinomial(64, rng.dirichlet(np.full(16, 0.3)))
    for i in range(4):
        u, p, tokens = np.zeros((64, 4), np.float32), np.zeros(2**16, np.float32), 16**i * np.arange(16) + (i > 0) * 7
        u[:, i] = np.arange(64) / 64
        for scale in (1 / 64, 8.0):
            p[tokens] = share * scale
            np.testing.assert_array_equal(draw(np.broadcast_to(p, (64, 2**16)), u), tokens.repeat(share))


@pytest.mark.parametrize("vocab", [1, 100, 8193, 151936])
def test_draw_inverts_the_cdf_and_never_takes_what_has_no_mass(vocab):
    rng = np.random.default_rng(vocab)
    p = rng.gamma(0.2, size=(16, vocab)).astype(np.float32)
    p[::2][rng.random((8, vocab)) < 0.5] = 0.0
    p[3] = 1.0
    p[:, vocab // 2] = np.maximum(p[:, vocab // 2], 1e-3)
    p[4] = 0.0
    p[4, vocab // 3] = 1e-30
    p /= p.sum(axis=1, keepdims=True)
    last = np.float32(1 - 2**-24)
    u = np.concatenate([np.zeros((3, 4)), np.full((8, 4), last), rng.random((5, 4))]).astype(np.float32)
    token = np.asarray(draw(p, u))
    assert token.dtype == np.int32 and np.all((token >= 0) & (token < vocab))
    chosen = p[np.arange(16), token]
    assert np.all(chosen > 0.0)
    depth = (-(-vocab // 256) - 1).bit_length()
    sizes = [1, 16, 256, 256 << (depth - depth // 2), 256 << depth]
    cdf = np.pad(np.cumsum(p.astype(np.float64), axis=1), ((0, 0), (1, sizes[-1] - vocab)), mode="edge")
    cdf[:, 0] = 0.0
    for i, (part, whole) in enumerate(itertools.pairwise(sizes)):
        ends = token // part * part, token // part * part + part, token // whole * whole, token // whole * whole + whole
        lower, upper, start, end = (cdf[np.arange(16), at] for at in ends)
        assert np.all((lower - start) / (end - start) - 1e-6 <= u[:, i])
        assert np.all(u[:, i] <= (upper - start) / (end - start) + 1e-6)


def test_draw_treats_bad_numbers_as_no_mass():
    p = np.array([[0, 0, 0], [np.nan, 0.5, 0], [-1, 0, 0.5]], np.float32)
    for u in (0.0, 0.5, 0.9999):
        assert draw(p, np.full((3, 4), u, np.float32)).tolist() == [0, 1, 2]


def test_logprobs_are_those_of_the_model():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(3, 50)).astype(np.float32) * 4
    x[0, 10:] = -np.inf
    token = np.array([2, 7, 49], np.int32)
    got = jax.jit(partial(pipeline.logprobs, k=4))(x, token)
    with np.errstate(divide="ignore"):
        want = x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got.chosen, want[np.arange(3), token], rtol=2e-6)
    np.testing.assert_array_equal(got.top_ids, np.argsort(-want, axis=1, kind="stable")[:, :4])
    np.testing.assert_allclose(got.top, -np.sort(-want, axis=1)[:, :4], rtol=2e-6, atol=1e-6)
    assert got.rank.tolist() == [1 + int((want[i] > want[i, t]).sum()) for i, t in enumerate(token)]


def test_misuse_is_an_error():
    cfg, params = compile_params(SamplingParams(repetition_penalty=1.1), vocab_size=5)
    with pytest.raises(AssertionError, match="history"):
        pipeline.target_probs(cfg, params, np.zeros((1, 5), np.float32))
    with pytest.raises(AssertionError, match="rows"):
        pipeline.target_probs(cfg, params, np.zeros((2, 5), np.float32))
