"""The test kit, public: contract suites for one's own parts, tiny models in GGUF, random weights, a dummy tokenizer.

`check_drafter(Mine())` and its siblings, and `assert_lossless`, are one line in anybody's test.
"""

from specsparse.engine.text.bpe import byte_characters
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.speculative.drafters.synthetic import Scripted
from specsparse.testing.contract import check_drafter, check_policy, check_tree
from specsparse.testing.damaged import Runner, load_everything, mutate
from specsparse.testing.drafting import draft_context, drafted_ids
from specsparse.testing.predictor_contract import check_predictor
from specsparse.testing.tiny import (
    CHATML,
    DummyTokenizer,
    bpe_vocabulary,
    spm_vocabulary,
    tiny_config,
    write_tiny_gguf,
)
from specsparse.testing.verifiers import assert_lossless, check_verifier

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
