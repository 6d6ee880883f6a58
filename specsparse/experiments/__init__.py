"""Experiments: settings from a config, kinds of experiment, sweeps, and where the numbers go."""
