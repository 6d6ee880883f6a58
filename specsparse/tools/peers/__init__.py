"""Other engines, each in a process of its own: llama.cpp, ik_llama.cpp and transformers on the same file as ours."""

from dataclasses import dataclass, field

from specsparse.support.files import Json

PYTHON_VARIABLE = "SPECSPARSE_PEER_PYTHON"
"""The environment variable that names the peers' interpreter; ours without it."""


@dataclass(frozen=True)
class PeerKind:
    script: str  # the child, beside this file
    needs: tuple[str, ...]  # distributions
    arguments: tuple[str, ...] = ()  # of the script
    options: Json = field(default_factory=dict)  # more of the "open" request
    flash: bool = False  # whether it has the "attend" and "batch" requests
    drafts: bool = False  # whether it has the "speculate" request
    routing: bool = False  # whether it has the "routing" request


_TORCH = ("transformers", "torch", "gguf", "accelerate")
PEERS = {
    "llama.cpp": PeerKind("child_llama_cpp.py", ("llama-cpp-python",), flash=True, drafts=True, routing=True),
    "ik_llama.cpp": PeerKind("child_llama_cpp.py", ("ik-llama-cpp-python",), ("ik_llama_cpp",), flash=True),
    "transformers": PeerKind("child_transformers.py", _TORCH),
    "transformers-bf16": PeerKind("child_transformers.py", _TORCH, options={"dtype": "bfloat16"}),
}
