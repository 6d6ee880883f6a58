"""Sparse FFNs in the manner of PowerInfer: its files, its rule, its roundings, and where hot neurons lie."""
