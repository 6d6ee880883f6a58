"""The test kit, public: contract suites for one's own parts, tiny models in GGUF, random weights, a dummy tokenizer.

`check_drafter(Mine())` and its siblings, and `assert_lossless`, are one line in anybody's test. Each is imported when
used: `assert_lossless` of a callable needs numpy alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsparse.engine.text.bpe import byte_characters
    from specsparse.kernels.packing.random_blocks import random_quantised
    from specsparse.speculative.drafters.synthetic import Scripted
    from specsparse.testing.contract import check_drafter, check_policy, check_tree
    from specsparse.testing.damaged import Runner, load_everything, mutate
    from specsparse.testing.drafting import draft_context, drafted_ids
    from specsparse.testing.lossless import assert_lossless
    from specsparse.testing.predictor_contract import check_predictor
    from specsparse.testing.tiny import (
        CHATML,
        DummyTokenizer,
        bpe_vocabulary,
        spm_vocabulary,
        tiny_config,
        write_tiny_gguf,
    )
    from specsparse.testing.verifiers import check_verifier

_HOMES = {
    "specsparse.engine.text.bpe": ("byte_characters",),
    "specsparse.kernels.packing.random_blocks": ("random_quantised",),
    "specsparse.speculative.drafters.synthetic": ("Scripted",),
    "specsparse.testing.contract": ("check_drafter", "check_policy", "check_tree"),
    "specsparse.testing.damaged": ("Runner", "load_everything", "mutate"),
    "specsparse.testing.drafting": ("draft_context", "drafted_ids"),
    "specsparse.testing.lossless": ("assert_lossless",),
    "specsparse.testing.predictor_contract": ("check_predictor",),
    "specsparse.testing.tiny": (
        "CHATML", "DummyTokenizer", "bpe_vocabulary", "spm_vocabulary", "tiny_config", "write_tiny_gguf",
    ),
    "specsparse.testing.verifiers": ("check_verifier",),
}  # fmt: skip

__all__ = [
    "CHATML",
    "DummyTokenizer",
    "Runner",
    "Scripted",
    "assert_lossless",
    "bpe_vocabulary",
    "byte_characters",
    "check_drafter",
    "check_policy",
    "check_predictor",
    "check_tree",
    "check_verifier",
    "draft_context",
    "drafted_ids",
    "load_everything",
    "mutate",
    "random_quantised",
    "spm_vocabulary",
    "tiny_config",
    "write_tiny_gguf",
]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'specsparse.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
