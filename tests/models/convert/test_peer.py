"""Converted files in llama.cpp: it loads them, cuts the same tokens, and its logits are ours.

Needs SPECSPARSE_PEER_PYTHON, an interpreter that has llama-cpp-python.
"""

import json
import os
import subprocess

import numpy as np
import pytest

import specsparse
from specsparse.models.convert.hf import convert_hf
from specsparse.models.convert.hf_tokenizer import PROBE
from tests.models.convert import checkpoints
from tests.models.convert.test_hf import FORMS
from tests.tolerances import PEER_GELU_NMSE, PEER_NMSE, nmse

PEER = os.environ.get("SPECSPARSE_PEER_PYTHON")
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


@pytest.mark.slow
@pytest.mark.skipif(not PEER, reason="SPECSPARSE_PEER_PYTHON is not set")
def test_llama_cpp_reads_what_was_converted(tmp_path):
    paths = []
    families = {k: v for k, v in checkpoints.FAMILIES.items() if k != "mistral"}  # its window is not read
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
    argv = [PEER, "-c", SCRIPT, json.dumps(paths), PROBE]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    for path, theirs in zip(paths, json.loads(done.stdout), strict=True):
        model = specsparse.load(path, kv_dtype="f32")
        assert model.tokenizer.encode(PROBE, add_special=True) == theirs["ids"], path
        error = nmse(model.logits(theirs["ids"][:32]), np.array(theirs["logits"]))
        print(f"{path}: NMSE {error:.1e}")
        assert error <= (PEER_GELU_NMSE if model.config.activation == "gelu_tanh" else PEER_NMSE), path
