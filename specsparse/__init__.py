"""Speculative and sparse-activation decoding of GGUF models in JAX: exact, measured, explained."""

import os
from typing import TYPE_CHECKING

from specsparse.errors import UserError
from specsparse.support.cgroup import cpus
from specsparse.support.lazy import lazy_names

if TYPE_CHECKING:
    from specsparse.api import Generation, GenerationStats, Model, SamplingParams, Stream, generate, load, stream
    from specsparse.runtime.prefix_cache import PrefixCache
    from specsparse.speculative.drafters import get_drafter, register
    from specsparse.speculative.drafters.list_drafter import ListDrafter
    from specsparse.speculative.proof.certify import certify
    from specsparse.speculative.proof.external import ExternalVerifier
    from specsparse.speculative.proof.results import CertificateReport
    from specsparse.support.citations import citation

os.environ.setdefault("NPROC", str(cpus()))  # XLA's own threads: it does not see the quota of a container

__version__ = "0.1.0"
__all__ = [
    "CertificateReport", "ExternalVerifier", "Generation", "GenerationStats", "ListDrafter", "Model", "PrefixCache",
    "SamplingParams", "Stream", "UserError", "certify", "citation", "generate", "get_drafter", "load", "register",
    "stream",
]  # fmt: skip

_HOMES = dict.fromkeys(__all__, "specsparse.api") | {
    "CertificateReport": "specsparse.speculative.proof.results",
    "ExternalVerifier": "specsparse.speculative.proof.external",
    "ListDrafter": "specsparse.speculative.drafters.list_drafter",
    "PrefixCache": "specsparse.runtime.prefix_cache",
    "certify": "specsparse.speculative.proof.certify",
    "citation": "specsparse.support.citations",
    "get_drafter": "specsparse.speculative.drafters",
    "load": "specsparse.runtime.load",  # a model is loaded without what drafts and verifies
    "register": "specsparse.speculative.drafters",
}
# Imported when first used: `python -m specsparse --help` need not wait for JAX.
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
