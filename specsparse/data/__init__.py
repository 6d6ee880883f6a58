"""Data of the project: prompts, the catalogue of models, sheets of devices, kept acceptance, heads."""
