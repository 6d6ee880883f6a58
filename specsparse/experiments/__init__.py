"""Experiments: settings from a config, kinds of experiment, sweeps, trackers."""
