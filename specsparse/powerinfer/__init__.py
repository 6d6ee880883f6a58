"""Sparse FFNs in the manner of PowerInfer: a room that is empty so far."""
