"""Contract C1: a row's logits are a function of its own path alone, bit for bit.

Promised, by equality and never by tolerance: feeding n tokens at once, in any pieces, beside any neighbours of a batch,
as rows of any tree, with 1 or 2 threads and on every instruction set gives the bits of feeding them one at a time. It
holds for the native kernels and for the jnp reference, on tiny random models and on SmolLM2, and from logits to drawn
tokens.
"""

import jax
import numpy as np
import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.engine import cache as kv
from specsparse.errors import UserError
from specsparse.kernels.native import cpu
from specsparse.testing import write_tiny_gguf
from tests.cells import cells
from tests.contracts.rigs import WIDTH, Rig, path_to, random_tree, tiny_rig
from tests.kernels.emulated_tiles import set_isa

GQA = {"d_model": 96, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 257}
MODELS = {
    "q4_0": {"quant": "Q4_0", "d_ff": 160, **GQA},
    "q4_1-bias-head32": {"quant": "Q4_1", "d_ff": 288, "bias": True, "head_dim": 32, "kv_dtype": "bf16", **GQA},
    "q8_0-neox": {"quant": "Q8_0", "d_ff": 160, "architecture": "qwen2", "tied": True, **GQA},
    "q6_k": {"quant": "Q6_K", "d_model": 256, "n_heads": 4, "n_kv_heads": 1, "d_ff": 512, "vocab_size": 259},
    "f16": {"quant": "F16", "d_model": 80, "n_heads": 5, "n_kv_heads": 5, "d_ff": 77, "vocab_size": 131},
    "f32-odd-head": {"quant": "F32", "d_model": 72, "n_heads": 3, "n_kv_heads": 1, "d_ff": 50, "vocab_size": 97,
                     "n_layers": 1},
    "reference": {"backend": "reference", "quant": "F32", "d_model": 48, "n_heads": 6, "n_kv_heads": 2, "d_ff": 50,
                  "n_layers": 1, "vocab_size": 97, "window": 5, "head_dim": 32, "kv_dtype": "q8_0"},
    "qwen3": {"quant": "Q8_0", "architecture": "qwen3", "head_dim": 32, "d_ff": 160, "kv_dtype": "q8_0", **GQA},
    "mistral": {"quant": "Q4_0", "d_ff": 160, "window": 5, **GQA},
    "smollm3": {"quant": "Q4_0", "architecture": "smollm3", "n_layers": 4, "d_ff": 96, **GQA},
    "gemma3": {"quant": "Q4_0", "architecture": "gemma3", "n_layers": 3, "full_every": 3, "head_dim": 32, "d_ff": 96,
               "tied": True, "window": 7, **GQA},
    "gemma3-reference": {"backend": "reference", "quant": "F32", "architecture": "gemma3", "full_every": 2, "d_ff": 50,
                         "vocab_size": 97, "d_model": 48, "n_heads": 6, "n_kv_heads": 2, "window": 3, "head_dim": 32,
                         "kv_dtype": "q8_0"},
    "olmo2": {"quant": "Q8_0", "architecture": "olmo2", "d_ff": 96, **GQA},
    "experts-olmoe": {"quant": "Q8_0", "architecture": "olmoe", "d_ff": 32, "n_experts": 6, **GQA},
    "experts-smallthinker": {"quant": "Q4_0", "architecture": "smallthinker", "n_layers": 1, "d_ff": 32, "window": 4096,
                             "gating": "sigmoid", "n_experts": 5, "n_chosen": 3, **GQA},
    "experts-gpt-oss": {"quant": "MXFP4", "architecture": "gpt-oss", "n_layers": 1, "d_ff": 32, "window": 5,
                        "n_experts": 4, **GQA},
    "experts-reference": {"backend": "reference", "quant": "F32", "architecture": "gpt-oss", "d_ff": 32, "window": 3,
                          "vocab_size": 97, "d_model": 48, "n_heads": 6, "n_kv_heads": 2, "n_layers": 1,
                          "kv_dtype": "q8_0", "head_dim": 32, "n_experts": 4},
}  # fmt: skip
LENGTH = 37


# Native kernels run these layers' kinds above, and the reference its window and its cache of eight bits.
RARE = ("olmo2", "experts-olmoe", "experts-reference", "gemma3-reference")


@pytest.fixture(scope="module", params=cells(MODELS, [name for name in MODELS if name not in RARE]))
def rig(request, tmp_path_factory) -> Rig:
    if MODELS[request.param].get("backend") != "reference" and not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    return tiny_rig(tmp_path_factory.mktemp("model"), **MODELS[request.param])


@pytest.fixture(scope="module")
def text(rig) -> list[int]:
    return np.random.default_rng(1).integers(0, rig.config.vocab_size, LENGTH).tolist()


@pytest.fixture(scope="module")
def wanted(rig, text) -> np.ndarray:
    """Logits of the text, fed token by token."""
    out = rig.one_by_one(text)
    assert np.isfinite(out).all()
    return out


@pytest.fixture
def settings():
    """Gives the native kernels' settings back."""
    isa, threads = cpu.isa(), cpu.threads()
    yield
    if isa:
        cpu.set_isa(isa)
        cpu.set_threads(threads)


def equal(got, wanted, note: str = "") -> None:
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(wanted).view(np.uint32), err_msg=note)


def chunkings(total: int, count: int, most: int = WIDTH, seed: int = 0):
    """Random pieces that add up to `total`."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        sizes, left = [], total
        while left:
            sizes.append(int(min(left, rng.integers(1, most + 1))))
            left -= sizes[-1]
        yield sizes


def test_n_rows_equal_one_at_a_time(rig, text, wanted):
    start = 5
    prefix = rig.feed([text[:start]], rig.cache())[1]
    for n in range(1, WIDTH + 1):
        got, _ = rig.feed([text[start : start + n]], prefix)
        equal(got[0, :n], wanted[start : start + n], f"{n} rows")
        assert (got[0, n:] == 0).all()


WIDTHS = [(name, n) for name in ("q4_1-bias-head32", "reference") for n in (2, 3, 5, 8)]


@pytest.mark.parametrize(
    ("rig", "n"), cells(WIDTHS, [w for w in WIDTHS if w[0] != "reference" or w[1] == 2]), indirect=["rig"]
)
def test_a_program_of_n_rows_equals_one_of_one_row(rig, text, wanted, n):
    """The same with the shape n itself, which is what a compiler sees."""
    equal(rig.in_chunks(text[: 3 * n], [n] * 3, width=n), wanted[: 3 * n])


def test_chunks_of_a_prompt(rig, text, wanted):
    for sizes in chunkings(LENGTH, 6):
        equal(rig.in_chunks(text, sizes), wanted, f"pieces {sizes}")


def test_neighbours_in_a_batch(rig, text, wanted):
    """Three sequences of other lengths, fed raggedly; one ends early, one begins late."""
    rng = np.random.default_rng(2)
    others = [rng.integers(0, rig.config.vocab_size, size).tolist() for size in (9, 30)]
    texts = [others[0], text, others[1]]
    alone = [rig.one_by_one(others[0]), wanted, rig.one_by_one(others[1])]
    cache, at = rig.cache(3), [0, 0, 0]
    while any(a < len(t) for a, t in zip(at, texts)):
        counts = [int(min(len(t) - a, rng.integers(0, WIDTH + 1))) for a, t in zip(at, texts)]
        got, cache = rig.feed([t[a : a + c] for t, a, c in zip(texts, at, counts)], cache)
        for b, count in enumerate(counts):
            equal(got[b, :count], alone[b][at[b] : at[b] + count], f"sequence {b} at {at[b]}")
            at[b] += count


@pytest.mark.parametrize("isa", ["portable", "avx2", "avxvnni", "avx512", "amx_emulated"])
def test_threads_and_instruction_sets(rig, text, wanted, isa, settings):
    if not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    try:
        set_isa(isa)
    except UserError as error:
        pytest.skip(str(error))
    for threads in (1, 2):
        cpu.set_threads(threads)
        equal(rig.in_chunks(text, [16, 1, 3, 9, 8]), wanted, f"{isa}, {threads} threads")
    equal(rig.one_by_one(text[:6]), wanted[:6], isa)


commit_path = jax.jit(kv.commit_path)  # by itself each call would compile the moves anew


def check_tree(rig: Rig, prefix: list[int], seed: int, nodes: int, rows: list[int], *, commits: bool = True) -> None:
    """Rows of a random tree equal their chains; a committed path goes on like its chain."""
    rng = np.random.default_rng(seed)
    vocabulary = rig.config.vocab_size
    parents, tokens = random_tree(rng, nodes), rng.integers(0, vocabulary, nodes).tolist()
    _, cache = rig.feed([prefix], rig.cache())
    padded = np.r_[parents, np.full(WIDTH - nodes, -1)][None]
    got, after = rig.feed([tokens], cache, parents=padded, commit=False)
    for row in rows:
        path = path_to(parents, row)
        chain, _ = rig.feed([[tokens[i] for i in path]], cache)
        for at, node in enumerate(path):
            equal(got[0, node], chain[0, at], f"tree {seed}, row {node}")
    if not commits:
        return
    leaf = int(np.argmax([len(path_to(parents, r)) for r in range(nodes)]))
    path, more = path_to(parents, leaf), rng.integers(0, vocabulary, 5).tolist()
    kept = np.array([[*path, *([-1] * (WIDTH - len(path)))]], np.int32)
    after = commit_path(after, jax.numpy.asarray(kept), jax.numpy.array([len(path)], np.int32))
    assert after.length.tolist() == [len(prefix) + len(path)]
    _, chain = rig.feed([[tokens[i] for i in path]], cache)
    equal(rig.feed([more], after)[0][0, :5], rig.feed([more], chain)[0][0, :5], f"tree {seed}, committed {path}")


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_tree(rig, text, seed):
    nodes = (16, 7, 12)[seed]
    check_tree(rig, text[: (1, 14, 16)[seed]], seed, nodes, list(range(nodes)))


def test_a_rollback_forgets(rig, text, wanted):
    """What was fed and taken back, or written over in part, leaves nothing behind; windows count positions again."""
    cache = rig.feed([text[:9]], rig.cache())[1]
    other = [(token + 1) % rig.config.vocab_size for token in text[9:23]]
    cache = kv.rollback(rig.feed([other], cache)[1], jax.numpy.array([12], np.int32))
    assert cache.length.tolist() == [12]
    cache = kv.rollback(cache, jax.numpy.array([9], np.int32))
    equal(rig.feed([text[9:23]], cache)[0][0, :14], wanted[9:23])


def test_a_tree_that_is_a_chain(rig, text, wanted):
    got, _ = rig.feed([text[:WIDTH]], rig.cache(), parents=np.arange(-1, WIDTH - 1)[None])
    equal(got[0], wanted[:WIDTH])


# The real model.


@pytest.fixture(scope="module")
def real(smollm2) -> Rig:
    return Rig(smollm2.config, smollm2.forward, smollm2.params_for(64), smollm2.kv_dtype)


@pytest.fixture(scope="module")
def story(smollm2) -> list[int]:
    text = "The clockmaker's daughter asked whether a clock that runs backwards is ever right, and he answered it is"
    ids = smollm2.tokenizer.encode(f"{text}, once in each turn of the sun and the moon.")[:32]
    assert len(ids) == 32
    return ids


def test_smollm2_rows_chunks_threads_and_isas(real, story, settings):
    wanted = real.one_by_one(story)
    for sizes in ([16, 16], [1, 2, 3, 4, 5, 6, 7, 4], [15, 9, 8], [13, 10, 9], [11, 12, 9], [14, 9, 9]):
        equal(real.in_chunks(story, sizes), wanted, f"pieces {sizes}")
    cpu.set_threads(1)
    equal(real.in_chunks(story, [8, 16, 8]), wanted, "1 thread")
    cpu.set_threads(2)
    for isa in ("avx2", "avxvnni", "avx512", "amx_emulated"):
        try:
            set_isa(isa)
        except UserError:
            continue
        sizes = [5] if isa == "amx_emulated" else [16, 16]  # emulated in C, 16 rows take ten seconds
        equal(real.in_chunks(story[: sum(sizes)], sizes), wanted[: sum(sizes)], isa)
    cpu.set_isa("portable")
    equal(real.in_chunks(story[:4], [4]), wanted[:4], "portable")


def test_smollm2_trees(real, story):
    """Without commits, which move the rows of thirty layers as those of one and take most of the time to compile."""
    check_tree(real, story[:11], 0, 16, [15, 9, 12], commits=False)
    check_tree(real, story[:16], 1, 9, [8, 5], commits=False)


# From logits to tokens: distributions and draws, through `generate`.

SAMPLED = SamplingParams(
    temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, max_tokens=24, ignore_eos=True
)


def check_batch(model, prompts, n: int = 9) -> None:
    """A batch of prompts gives the tokens that each gives alone with its seed; n samples begin with that of one."""
    together = specsparse.generate(model, prompts, sampling=SAMPLED, seed=7)
    alone = [specsparse.generate(model, p, sampling=SAMPLED, seed=g.seed) for p, g in zip(prompts, together)]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    assert len({g.token_ids for g in together}) == len(prompts)
    if n > 1:
        many = specsparse.generate(model, prompts[0], sampling=SAMPLED, n=n, seed=7)
        assert many[0].token_ids == alone[0].token_ids and len({g.token_ids for g in many}) == n


# The reference's rows are compared above, and those of its sampling in tests/engine/sampling.
@pytest.mark.parametrize(("backend", "n"), cells([("native", 3), ("native", 9), ("reference", 1)], [("native", 3)]))
def test_a_batch_draws_what_each_prompt_draws_alone(tmp_path, backend, n):
    if backend == "native" and not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_0", d_model=64, d_ff=96, vocab_size=300, n_layers=1)
    check_batch(specsparse.load(path, backend=backend), ["hello world", "a", "the other one is longer than this"], n)


def test_smollm2_draws_alike_in_a_batch(smollm2):
    check_batch(
        smollm2, ["Once upon a time", "2 + 2 =", "The three distributions of robotics, in short, are these:"], 3
    )
