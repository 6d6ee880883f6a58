"""The verifier of Hugging Face transformers, live: `generation.utils._speculative_sampling`, algorithm 1 of 2211.17192.

It takes logits, and draws with `torch.rand_like` and `torch.multinomial`. Where uniforms are handed in, it sees a torch
whose two draws read them; everything else is its own code, in float32 as `generate` runs it.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from specsparse.errors import UserError
from specsparse.speculative.proof.external import ExternalVerifier

if TYPE_CHECKING:
    import torch

SAMPLES = 20_000
"""Sequences of each case where it draws for itself."""


def speculative_sampling(*, uniforms: bool = True, ensemble: float | None = None) -> ExternalVerifier:
    """The function of the installed transformers.

    Args:
        uniforms: whether it is handed them, or draws from torch's global generator.
        ensemble: its `assistant_ensemble_weight`, which is lossy by design (2604.07622).

    Raises:
        UserError: transformers or torch is not installed, or has no such function.
    """
    utils, torch = modules()
    name = f"transformers {'' if uniforms else 'own draws '}{'' if ensemble is None else f'ensemble {ensemble:g}'}"

    def verify(p, q, drafts, uniforms=None):
        K = len(drafts)
        with _fed(utils, uniforms) if uniforms is not None else contextlib.nullcontext():
            tokens, _ = utils._speculative_sampling(
                drafts[None], q.log()[None], K, p.log()[None], assistant_ensemble_weight=ensemble
            )
        return tokens[0].tolist()

    if not uniforms:
        torch.manual_seed(0)
    how = "uniforms" if uniforms else "own"
    return ExternalVerifier(
        verify, name=name.strip(), arrays="torch", randomness=how, samples=SAMPLES, lossless=ensemble is None
    )


def modules() -> tuple[ModuleType, ModuleType]:
    """`transformers.generation.utils` and torch.

    Raises:
        UserError: they are not installed, or have no `_speculative_sampling`.
    """
    try:
        import torch
        from transformers.generation import utils
    except ImportError as error:
        raise UserError(f"transformers and torch are needed ({error}): pip install transformers torch") from error
    if not hasattr(utils, "_speculative_sampling"):
        raise UserError("this transformers has no generation.utils._speculative_sampling: 4.37 to 5.23 have")
    return utils, torch


class _Fed:
    """torch, but for its two draws: they read given uniforms, the last one for the token."""

    def __init__(self, torch: ModuleType, uniforms: "torch.Tensor"):
        self._torch, self._uniforms = torch, uniforms

    def __getattr__(self, name: str) -> object:
        return getattr(self._torch, name)

    def rand_like(self, like: "torch.Tensor") -> "torch.Tensor":
        """The coins."""
        return self._uniforms[: like.numel()].reshape(like.shape).to(like.dtype)

    def multinomial(self, weights: "torch.Tensor", num_samples: int) -> "torch.Tensor":
        """One token a row by inverse CDF; what torch refuses is refused."""
        if num_samples != 1 or not bool((weights.sum(dim=-1) > 0).all()):
            raise RuntimeError("probability tensor contains either inf, nan or element < 0, or sums to 0")
        cdf = weights.cumsum(dim=-1)
        below = (cdf <= self._uniforms[-1] * cdf[:, -1:]).sum(dim=-1, keepdim=True)
        last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1, keepdim=True)
        return self._torch.minimum(below, last)


@contextlib.contextmanager
def _fed(utils: ModuleType, uniforms: "torch.Tensor") -> Iterator[None]:
    """`utils` with a torch whose draws read the uniforms."""
    original = utils.torch
    utils.torch = _Fed(original, uniforms)
    try:
        yield
    finally:
        utils.torch = original
