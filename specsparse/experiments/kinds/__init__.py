"""Kinds of experiment, one module each."""
