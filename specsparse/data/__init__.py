"""What travels with the project: prompts, the catalogue of models, sheets of devices, kept acceptance, heads.

The modules read prompts, these and those of benchmarks, and the sheets of devices.
"""
