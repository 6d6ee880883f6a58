"""Fitting predictors to text, judging them, and keeping them."""
