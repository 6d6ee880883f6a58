"""Predictors of the neurons of an FFN worth computing, their training and their evaluation."""

from specsparse.predictors.base import FFN, Needs, Predictor, get_predictor
from specsparse.predictors.scored import Scored

__all__ = ["FFN", "Needs", "Predictor", "Scored", "get_predictor"]
