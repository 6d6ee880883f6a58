"""Which neurons of an FFN to compute: predictors, their training and their evaluation."""

from specsparse.predictors.base import Needs, Predictor, Scored
from specsparse.predictors.ffn import FFN
from specsparse.predictors.registry import get_predictor

__all__ = ["FFN", "Needs", "Predictor", "Scored", "get_predictor"]
