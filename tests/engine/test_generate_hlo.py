"""The compiled decode loop: nothing the size of the cache is copied in it, and nothing calls the host.

Promised of the optimised HLO of plain and of speculative decoding. And a program is compiled once, however often it
runs.
"""

import re

import pytest

import specsparse
from specsparse import SamplingParams
from specsparse.kernels.native import cpu
from specsparse.testing import write_tiny_gguf
from tests.cells import cells

HOST = re.compile(r"callback|outfeed|infeed|send\(|recv\(|host_compute", re.IGNORECASE)
HLO_TYPE = {"f16": "f16", "f32": "f32", "bf16": "bf16"}


# The cache of all models by default; another dtype is another type of the same arrays.
@pytest.fixture(scope="module", params=cells(["f16", "f32"], ["f16"]))
def model(request, tmp_path_factory):
    if not cpu.available():
        pytest.skip(f"no native kernels: {cpu.why_missing()}")
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", quant="Q4_0", d_model=64, d_ff=96)
    return specsparse.load(path, kv_dtype=request.param)


def decode_program(model) -> str:
    """The HLO of the one decode program there is."""
    (program,) = [p for key, p in model.programs.compiled.items() if "decode" in str(key[0])]
    return program.as_text()


def computations(hlo: str) -> dict[str, list[str]]:
    """The lines of each computation."""
    out: dict[str, list[str]] = {}
    for line in hlo.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            out[name] = []
        elif out and line.startswith(" "):
            out[name].append(line)
    return out


def reachable(parts: dict[str, list[str]], root: str) -> list[str]:
    """Lines of a computation and of all that it calls."""
    seen, stack, lines = set(), [root], []
    while stack:
        name = stack.pop()
        if name in seen or name not in parts:
            continue
        seen.add(name)
        lines += parts[name]
        for line in parts[name]:
            stack += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)
            for group in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", line):
                stack += [item.strip().lstrip("%") for item in group.split(",")]
    return lines


def decode_loop(hlo: str) -> list[str]:
    """Lines of the body of the outermost loop that holds the layers."""
    parts = computations(hlo)
    bodies = re.findall(r"while\(.*?body=%?([\w.\-]+)", hlo)
    loops = [reachable(parts, body) for body in bodies]
    loops = [lines for lines in loops if any("specsparse_layers" in line for line in lines)]
    assert loops, "no loop with the layers was found"
    return max(loops, key=len)


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=8),
    "warm": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.1, logprobs=2, max_tokens=8),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_the_loop_copies_no_cache_and_calls_no_host(model, sampling, drafter):
    model.programs.compiled.clear()
    specsparse.generate(model, "abab", sampling=SAMPLINGS[sampling], drafter=drafter)
    hlo = decode_program(model)
    assert not HOST.search(hlo)
    cache = model.new_cache(1, 256)
    lines = decode_loop(hlo)
    assert sum("specsparse_layers" in line for line in lines) == 1
    for array in (cache.k[0], cache.v[0]):
        shape = f"{HLO_TYPE[model.kv_dtype]}[{','.join(map(str, array.shape))}]"
        copies = re.compile(rf"= \(?{re.escape(shape)}\S* (copy|copy-start|fusion|concatenate)\(")
        moved = [line for line in lines if copies.search(line)]
        assert any(shape in line for line in lines) and not moved, moved


MOST = {None: 19, "prompt_lookup": 53, "ngram_simple": 53}
"""Operations of one round of greedy decoding. They take about a microsecond each, however small they are."""


@pytest.mark.parametrize("drafter", MOST)
def test_a_round_has_few_operations(model, drafter):
    """And what follows the target's products takes no branch and no loop of its own."""
    model.programs.compiled.clear()
    specsparse.generate(model, "abab", sampling=SAMPLINGS["greedy"], drafter=drafter)
    hlo = decode_program(model)
    parts = computations(hlo)
    (body,) = [lines for lines in parts.values() if any("specsparse_layers" in line for line in lines)]
    names = [re.search(r" ([a-z][\w\-]*)\(", line.split(" = ", 1)[1]) for line in body if " = " in line]
    ran = [name[1] for name in names if name]
    ran = [name for name in ran if name not in ("get-tuple-element", "parameter", "tuple", "constant", "bitcast")]
    assert "layers" in hlo and len(ran) <= MOST[drafter], ran
    assert not {"while", "conditional", "call"} & set(ran)


def test_a_program_is_compiled_once(model):
    """Other prompts, seeds and numbers of the same kind run what is there; another kind adds its program."""
    model.programs.compiled.clear()
    first = specsparse.generate(model, "abab", sampling=SAMPLINGS["warm"])
    count = len(model.programs.compiled)
    assert first.stats.compile_s > 0 and count == 2  # a prompt piece and the loop
    for seed, prompt in enumerate(("xyz", "a longer one", "abab")):
        sampling = SAMPLINGS["warm"].merged(temperature=0.3 + seed, top_k=5 + seed, max_tokens=3 + seed)
        assert specsparse.generate(model, prompt, sampling=sampling, seed=seed).stats.compile_s == 0
    assert len(model.programs.compiled) == count
    specsparse.generate(model, "abab", sampling=SAMPLINGS["greedy"])
    assert len(model.programs.compiled) == count + 1  # the prompt's program does not depend on the distribution
    list(specsparse.stream(model, "abab", sampling=SAMPLINGS["greedy"]))
    assert len(model.programs.compiled) == count + 1  # streaming runs the same loop


def test_logits_reuse_their_programs(model):
    sizes = [model.logits(list(range(3, 3 + n))).shape[0] for n in (5, 9, 20, 32)]
    assert sizes == [5, 9, 20, 32] and model.logits_program._cache_size() == 1
