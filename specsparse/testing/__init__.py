"""The test kit, public: contract suites for one's own parts, tiny models in GGUF, random weights, a dummy tokenizer.

`check_drafter(Mine())` and its siblings, and `assert_lossless`, are one line in anybody's test. Each is imported when
used: `assert_lossless` of a callable needs numpy alone.
"""

from typing import TYPE_CHECKING

from specsparse.support.lazy import lazy_names

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
    from specsparse.testing.tracker_contract import check_tracker
    from specsparse.testing.verifiers import check_verifier

__all__ = [
    "CHATML", "DummyTokenizer", "Runner", "Scripted", "assert_lossless", "bpe_vocabulary", "byte_characters",
    "check_drafter", "check_policy", "check_predictor", "check_tracker", "check_tree", "check_verifier",
    "draft_context", "drafted_ids", "load_everything", "mutate", "random_quantised", "spm_vocabulary", "tiny_config",
    "write_tiny_gguf",
]  # fmt: skip

_HOMES = dict.fromkeys(__all__, "specsparse.testing.tiny") | {
    "Runner": "specsparse.testing.damaged",
    "Scripted": "specsparse.speculative.drafters.synthetic",
    "assert_lossless": "specsparse.testing.lossless",
    "byte_characters": "specsparse.engine.text.bpe",
    "check_drafter": "specsparse.testing.contract",
    "check_policy": "specsparse.testing.contract",
    "check_predictor": "specsparse.testing.predictor_contract",
    "check_tree": "specsparse.testing.contract",
    "check_tracker": "specsparse.testing.tracker_contract",
    "check_verifier": "specsparse.testing.verifiers",
    "draft_context": "specsparse.testing.drafting",
    "drafted_ids": "specsparse.testing.drafting",
    "load_everything": "specsparse.testing.damaged",
    "mutate": "specsparse.testing.damaged",
    "random_quantised": "specsparse.kernels.packing.random_blocks",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
