"""Speculative and sparse-activation decoding of GGUF Llama models in JAX: exact, measured, explained."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsparse.api import Generation, GenerationStats, Model, SamplingParams, Stream, generate, load, stream
    from specsparse.speculative.certify import CertificateReport, certify

__version__ = "0.1.0"
__all__ = [
    "CertificateReport",
    "Generation",
    "GenerationStats",
    "Model",
    "SamplingParams",
    "Stream",
    "certify",
    "generate",
    "load",
    "stream",
]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `python -m specsparse --help` need not wait for JAX."""
    if name in ("certify", "CertificateReport"):
        from specsparse.speculative import certify

        return getattr(certify, name)
    if name in __all__:
        from specsparse import api

        return getattr(api, name)
    raise AttributeError(f"module 'specsparse' has no attribute {name!r}")
