"""Two processes of two CPU devices each, joined by `jax.distributed` as in docs/sharding.md, against one device."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import specsparse
from specsparse.testing import write_tiny_gguf
from tests.engine.mesh.test_sharded import EVEN, GREEDY, IDS

PROCESS = """
import os, sys
import jax
jax.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]))
import specsparse
from tests.engine.mesh.test_sharded import GREEDY, IDS

model = specsparse.load(sys.argv[1], mesh=jax.device_count())
here = {shard.device.process_index for shard in model.params.output.data.addressable_shards}
assert here == {jax.process_index()}, here
plain = specsparse.generate(model, IDS, **GREEDY).token_ids
drafted = specsparse.generate(model, IDS, drafter="prompt_lookup", verifier="greedy", **GREEDY).token_ids
assert drafted == plain
print("tokens", len(jax.devices()), *plain)
"""


@pytest.mark.slow
def test_two_processes_write_what_one_device_writes(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1", **EVEN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    env = {
        **os.environ, "COORDINATOR": coordinator, "PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SPECSPARSE_THREADS": "1",
    }  # fmt: skip
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path)],
            env={**env, "PROCESS": str(rank)}, cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=150) for process in both]
    finally:
        for process in both:
            process.kill()
    wanted = specsparse.generate(specsparse.load(path), IDS, **GREEDY).token_ids
    for process, (out, error) in zip(both, outputs, strict=True):
        assert process.returncode == 0, error
        assert out.splitlines()[-1] == " ".join(["tokens 4", *map(str, wanted)])
