"""What llama.cpp's `common_sampler_sample_and_accept_n` does, with the sampler of the installed llama-cpp-python.

At each row the sampler chain draws a token from the target's logits; it is emitted, and the drafts go on as long as it
is the draft. The C++ function is not in the library's C interface: the loop is written here, the draws are live.
"""

import ctypes
import importlib
from types import ModuleType

import numpy as np

from specsparse.errors import UserError
from specsparse.speculative.proof.cases import keep_top
from specsparse.speculative.proof.external import ExternalVerifier

SAMPLES = 20_000
"""Sequences of each case."""


class Sampler:
    """A chain of llama.cpp's samplers that ends in `dist`."""

    def __init__(self, *, seed: int, top_k: int = 0):
        self._lib = lib = library()
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if top_k:
            lib.llama_sampler_chain_add(self._chain, lib.llama_sampler_init_top_k(top_k))
        lib.llama_sampler_chain_add(self._chain, lib.llama_sampler_init_dist(seed))

    def draw(self, probs_V: np.ndarray) -> int:
        """A token of the distribution."""
        lib, V = self._lib, len(probs_V)
        with np.errstate(divide="ignore"):
            logits = np.log(probs_V)
        data = (lib.llama_token_data * V)(*((i, x, 0.0) for i, x in enumerate(logits.tolist())))
        several = lib.llama_token_data_array(data=data, size=V, selected=-1, sorted=False)
        lib.llama_sampler_apply(self._chain, ctypes.byref(several))
        return int(several.data[several.selected].id)

    def __del__(self):
        if chain := getattr(self, "_chain", None):
            self._lib.llama_sampler_free(chain)


def sample_and_match(*, seed: int = 1, top_k: int = 0) -> ExternalVerifier:
    """The rule by samples.

    Args:
        seed: of the sampler, one for all rounds as in a server's slot.
        top_k: of the chain; the distribution to keep is then p's top k.

    Raises:
        UserError: llama-cpp-python is not installed.
    """
    sampler = Sampler(seed=seed, top_k=top_k)

    def verify(p, q, drafts):
        emitted = []
        for row, draft in zip(p, [*drafts.tolist(), -1]):
            emitted.append(sampler.draw(row))
            if emitted[-1] != draft:
                break
        return emitted

    name = f"llama.cpp sample and match{f', top-k {top_k}' if top_k else ''}"
    cut = keep_top(top_k) if top_k else None
    return ExternalVerifier(verify, name=name, dtype="float32", randomness="own", samples=SAMPLES, target_law=cut)


def library() -> ModuleType:
    """llama-cpp-python.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(f"llama-cpp-python is needed ({error}): pip install llama-cpp-python") from error
