"""Predictors of active neurons: a room that is empty so far."""
