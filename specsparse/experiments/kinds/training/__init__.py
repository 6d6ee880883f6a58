"""Trainings that go on where they were stopped: drafters, ReLU models, predictors of active neurons."""
