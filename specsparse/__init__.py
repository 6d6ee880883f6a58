"""Speculative and sparse-activation decoding of GGUF models in JAX: exact, measured, explained."""

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

from specsparse.errors import UserError
from specsparse.support.cgroup import cpus

if TYPE_CHECKING:
    from specsparse.api import Generation, GenerationStats, Model, SamplingParams, Stream, generate, load, stream
    from specsparse.speculative.drafters import get_drafter, register
    from specsparse.speculative.drafters.list_drafter import ListDrafter
    from specsparse.speculative.proof.certify import certify
    from specsparse.speculative.proof.external import ExternalVerifier
    from specsparse.speculative.proof.results import CertificateReport
    from specsparse.support.citations import citation

os.environ.setdefault("NPROC", str(cpus()))  # XLA's own threads: it does not see the quota of a container

__version__ = "0.1.0"
__all__ = [
    "CertificateReport",
    "ExternalVerifier",
    "Generation",
    "GenerationStats",
    "ListDrafter",
    "Model",
    "SamplingParams",
    "Stream",
    "UserError",
    "certify",
    "citation",
    "generate",
    "get_drafter",
    "load",
    "register",
    "stream",
]


_HOMES = {
    "certify": "specsparse.speculative.proof.certify",
    "CertificateReport": "specsparse.speculative.proof.results",
    "ExternalVerifier": "specsparse.speculative.proof.external",
    "citation": "specsparse.support.citations",
    "get_drafter": "specsparse.speculative.drafters",
    "ListDrafter": "specsparse.speculative.drafters.list_drafter",
    "load": "specsparse.runtime.load",  # a model is loaded without what drafts and verifies
    "register": "specsparse.speculative.drafters",
}


_RENAMED = {"Handed": "ExternalVerifier"}  # the old names go with the next version


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `python -m specsparse --help` need not wait for JAX."""
    if name in _RENAMED:
        warnings.warn(f"specsparse.{name} is specsparse.{_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in __all__:
        raise AttributeError(f"module 'specsparse' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "specsparse.api")), name)


def __dir__() -> list[str]:
    """The public names, imported or not, so that TAB and `help` show them, and nothing else does."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
