"""SmolLM2-135M (Q4_1) against llama.cpp on five prompts: token ids, and teacher-forced logits over prompt and answer.

Promised: ids are equal; logits are as near to llama.cpp's as llama.cpp is to itself. Its own noise sets the limits: the
same build on the same machine differs from itself by a mean KL of 2.6e-3 when the prompt is fed in batches of 512 or of
1, and other instruction sets or flash attention give 2.8e-3 to 3.8e-3, because a rounding difference of 1e-7 flips
codes of the int8 activations and grows through 30 layers. A KL below 1e-3, or 99 % agreement where the top two logits
are more than 0.1 apart, lies under that floor. The float kernels, which do not round activations, agree more often.
"""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsparse
from specsparse import kernels
from specsparse.engine.llama import Want, make_forward
from specsparse.kernels.native import cpu
from tests.tolerances import nmse

DATA = Path(__file__).parents[1] / "data" / "oracle_llama"
PROMPTS = {p["id"]: p for p in json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))}
MARGIN = 0.1

MEAN_KL = 3.9e-3  # llama.cpp's own spread; measured here 3.4e-3 (native), 3.1e-3 (float)
AGREEMENT = {"native": 0.97, "float": 0.985}  # measured 0.977, 0.9885
NATIVE_NMSE = 1e-3  # of the native logits against the float ones; measured 5.9e-4 over all, 1.0e-3 on one


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, np.ndarray]]:
    with np.load(DATA / "golden_smollm2_q4_1.npz") as arrays:
        return {p: {key.split("/")[1]: arrays[key] for key in arrays if key.startswith(f"{p}/")} for p in PROMPTS}


@pytest.fixture(scope="module")
def native(smollm2, golden) -> dict[str, np.ndarray]:
    if smollm2.kernels.name != "native":
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    return {name: smollm2.logits(forced(g)) for name, g in golden.items()}


@pytest.fixture(scope="module")
def batched(smollm2) -> specsparse.Model:
    """The float kernels, batched: the reference's definition at a bearable speed."""
    return specsparse.load("smollm2-135m", backend="xla", kv_dtype="f32")


@pytest.fixture(scope="module")
def floats(batched, golden) -> dict[str, np.ndarray]:
    return {name: batched.logits(forced(g)) for name, g in golden.items()}


def forced(g: dict[str, np.ndarray]) -> np.ndarray:
    """Prompt and llama.cpp's greedy answer, as many tokens as there are logits of."""
    return np.concatenate([g["ids"], g["greedy"]])[: len(g["lse"])]


def divergence(logits: dict[str, np.ndarray], golden) -> float:
    """Mean KL(llama.cpp || ours) over the oracle's 64 most likely tokens of each position."""
    kl = []
    for name, g in golden.items():
        x = logits[name].astype(np.float64)
        ours = x - np.logaddexp.reduce(x, axis=1, keepdims=True)
        theirs = g["top_logits"].astype(np.float64) - g["lse"].astype(np.float64)[:, None]
        kl.append((np.exp(theirs) * (theirs - np.take_along_axis(ours, g["top_ids"].astype(np.int64), 1))).sum(axis=1))
    return float(np.concatenate(kl).mean())


def agreement(logits: dict[str, np.ndarray], golden) -> float:
    """Share of the positions with a clear winner at which ours is the same."""
    same = []
    for name, g in golden.items():
        clear = g["top_logits"][:, 0] - g["top_logits"][:, 1] > MARGIN
        same.append((logits[name].argmax(axis=1) == g["top_ids"][:, 0])[clear])
    return float(np.concatenate(same).mean())


@pytest.mark.parametrize("name", PROMPTS)
def test_token_ids_are_equal(smollm2, golden, name):
    tokenizer, prompt = smollm2.tokenizer, PROMPTS[name]
    chat = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in prompt.get("chat", ())]
    text = prompt.get("text") or "".join(chat) + "<|im_start|>assistant\n"  # the oracle has no system turn
    ids = tokenizer.encode(text, add_special=True, parse_special=True)
    assert ids == golden[name]["ids"].tolist()
    assert tokenizer.decode(ids, skip_special=False) == text


def test_native_logits_are_as_near_as_llama_cpp_is_to_itself(native, golden):
    assert divergence(native, golden) <= MEAN_KL
    assert agreement(native, golden) >= AGREEMENT["native"]


@pytest.mark.slow
def test_float_logits_agree(floats, golden):
    assert divergence(floats, golden) <= MEAN_KL
    assert agreement(floats, golden) >= AGREEMENT["float"]


@pytest.mark.slow
def test_native_logits_are_near_the_float_ones(native, floats):
    assert nmse(np.concatenate(list(native.values())), np.concatenate(list(floats.values()))) <= NATIVE_NMSE


def test_the_reference_is_the_batched_float_path(batched, golden):
    """A few layers are enough to tell."""
    tokens, out = jnp.asarray(forced(golden["story"])[None, :3], jnp.int32), []
    for name in ("reference", "xla"):
        run = jax.jit(partial(make_forward(batched.config, kernels.get(name)), want=Want(layers=(0, 1, 2))))
        out.append(run(batched.params_for(16), tokens, batched.new_cache(1, 16))[0].logits)
    assert nmse(*out) <= 1e-10
