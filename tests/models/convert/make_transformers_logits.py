"""Makes transformers_logits.npz: logits of transformers, in float64, for the tiny checkpoints of each architecture.

    python -m tests.models.convert.make_transformers_logits PYTHON

PYTHON is an interpreter that has torch and transformers; the package needs neither. Made with transformers 5.24.0.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.models.convert import checkpoints

OUT = Path(__file__).with_name("transformers_logits.npz")
IDS = [1, 40, 41, 250, 7, 7, 90, 12, 33, 200, 201, 5, 77, 78, 150, 3] * 2
ROWS = (0, 3, 4, 5, 6, 11, 16, 23, 31)
"""Rows that are kept; windows begin to cut at the sixth and the seventh."""
SCRIPT = """
import json, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
ids, rows, folders, out = json.loads(sys.argv[1])
found = {}
for name, folder in folders.items():
    kind = AutoModelForImageTextToText if name == "multimodal" else AutoModelForCausalLM
    more = {"experts_implementation": "eager"} if name in ("qwen3moe", "olmoe", "gpt-oss") else {}
    model, info = kind.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True, **more
    )
    odd = {key for key in info["missing_keys"] if "vision" not in key and "projector" not in key}
    assert not odd and not {key for key in info["unexpected_keys"] if not key.endswith("inv_freq")}, info
    model.eval()
    with torch.no_grad():
        found[name] = model(torch.tensor([ids])).logits[0, rows].numpy().astype(np.float32)
np.savez_compressed(out, **found)
"""


def main(python: str) -> None:
    """Writes the checkpoints, and the file beside this one."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {}
        for name, more in checkpoints.FAMILIES.items():
            config = {**checkpoints.CONFIG, **more}
            folders[name] = str(checkpoints.save(Path(folder) / name, config, checkpoints.weights(config)))
        folders["multimodal"] = str(
            checkpoints.save(Path(folder) / "multimodal", checkpoints.MULTIMODAL, checkpoints.multimodal_weights())
        )
        argv = json.dumps([IDS, ROWS, folders, str(OUT)])
        subprocess.run([python, "-c", SCRIPT, argv], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
