"""Converted files in llama.cpp, which cuts the same tokens and has our logits, and in the speculators library.

Needs SPECSPARSE_PEER_PYTHON, an interpreter that has llama-cpp-python or speculators.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import specsparse
from specsparse.engine.gguf.reader import open_gguf
from specsparse.models.convert.heads import convert_head
from specsparse.models.convert.hf import convert_hf
from specsparse.models.convert.hf_tokenizer import PROBE
from tests.models.convert import checkpoints
from tests.models.convert.test_hf import FORMS
from tests.tolerances import PEER_GELU_NMSE, PEER_NMSE, nmse

PEER = os.environ.get("SPECSPARSE_PEER_PYTHON")
DATA = Path(__file__).parents[2] / "data"
SCRIPT = """
import json, sys
import numpy as np
from llama_cpp import Llama
out = []
for path in json.loads(sys.argv[1]):
    m = Llama(path, n_ctx=128, swa_full=True, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0)
    ids = m.tokenize(sys.argv[2].encode(), add_bos=True, special=False)
    m.eval(ids[:32])
    out.append({"ids": ids, "logits": np.array(m.scores[:len(ids[:32])], np.float64).tolist()})
json.dump(out, sys.stdout)
"""


SPECULATORS = """
import sys
import numpy as np
from speculators import SpeculatorModel
for folder in sys.argv[1:]:
    model = SpeculatorModel.from_pretrained(folder)
    verifier = model.config.speculators_config.verifier
    assert verifier.architectures == ["LlamaForCausalLM"], verifier
    state = {key: value.float().numpy() for key, value in model.state_dict().items()}
    np.savez(folder + ".npz", **{key: value for key, value in state.items() if np.isfinite(value).all()})
"""


@pytest.fixture
def peer():
    """Runs a script that needs the package in the other interpreter."""

    def run(package, script, *argv):
        found = PEER and subprocess.run([PEER, "-c", f"import {package}"], capture_output=True).returncode == 0
        if not found:
            pytest.skip(f"SPECSPARSE_PEER_PYTHON names no interpreter that has {package}")
        done = subprocess.run([PEER, "-c", script, *argv], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.mark.slow
def test_speculators_loads_the_folders_that_are_written(tmp_path, peer):
    """With the verifier that they name: its embedding and output matrix, the head's own matrices."""
    config = {**checkpoints.CONFIG, "model_type": "llama", "hidden_size": 32, "vocab_size": 512, "num_hidden_layers": 8}
    target, w = tmp_path / "target", checkpoints.weights(config)
    checkpoints.save(target, config, w)
    cases = []
    for name in ("eagle3", "dflash"):
        source = DATA / "eagle3" / "default" if name == "eagle3" else DATA / name
        gguf, out = tmp_path / f"{name}.gguf", tmp_path / name
        convert_head(name, source, gguf, target=open_gguf(DATA / "eagle3" / "target.gguf"))  # which names no target
        cases.append((convert_head(name, gguf, out, verifier=str(target)), out))
    peer("speculators", SPECULATORS, *(str(out) for _, out in cases))
    for file, out in cases:
        state = np.load(f"{out}.npz")
        np.testing.assert_array_equal(state["fc.weight"], file.values("fc.weight"))
        for theirs, ours in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
            mine = file.ids is None if theirs == "lm_head" else "token_embd.weight" not in file.tensors
            if mine:
                np.testing.assert_array_equal(state[f"{theirs}.weight"], w[f"{ours}.weight"])


@pytest.mark.slow
def test_llama_cpp_reads_what_was_converted(tmp_path, peer):
    paths = []
    unread = ("mistral", "phi3")  # llama.cpp does not read their windows
    families = {k: v for k, v in checkpoints.FAMILIES.items() if k not in unread}
    for name, form in (FORMS | families).items():
        if form.get("architectures") == ["Qwen2ForCausalLM"]:
            continue  # its biases are in the other tests
        config = {**checkpoints.CONFIG, **form}
        folder = checkpoints.save(tmp_path / name, config, checkpoints.weights(config))
        if name == "llama-160m":
            checkpoints.spm_tokenizer(folder)
        else:
            checkpoints.bpe_tokenizer(folder, "llama-bpe" if name == "llama-3" else "smollm")
        paths.append(str(tmp_path / f"{name}.gguf"))
        convert_hf(folder, paths[-1], type_name="f32")
    found = json.loads(peer("llama_cpp", SCRIPT, json.dumps(paths), PROBE))
    for path, theirs in zip(paths, found, strict=True):
        rounded = {"yarn": "llama.cpp"} if path.endswith("gpt-oss.gguf") else {}
        model = specsparse.load(path, kv_dtype="f32", **rounded)
        assert model.tokenizer.encode(PROBE, add_special=True) == theirs["ids"], path
        error = nmse(model.logits(theirs["ids"][:32]), np.array(theirs["logits"]))
        print(f"{path}: NMSE {error:.1e}")
        assert error <= (PEER_GELU_NMSE if model.config.activation == "gelu_tanh" else PEER_NMSE), path
