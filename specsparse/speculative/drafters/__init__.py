"""Drafters: what proposes tokens. `get_drafter` makes one by name."""

from specsparse.speculative.drafters.model import ModelDrafter
from specsparse.speculative.drafters.ngram import NGram
from specsparse.speculative.drafters.plan import DrafterPlan
from specsparse.speculative.drafters.registry import get_drafter
from specsparse.speculative.drafters.scripted import Scripted
from specsparse.speculative.drafters.suffix import Suffix
from specsparse.speculative.drafters.synthetic import Synthetic, SyntheticRates, synthetic_verdict

__all__ = [
    "DrafterPlan",
    "ModelDrafter",
    "NGram",
    "Scripted",
    "Suffix",
    "Synthetic",
    "SyntheticRates",
    "get_drafter",
    "synthetic_verdict",
]
