"""Measuring: time, bandwidth, costs, recorded rounds, and on what machine."""
