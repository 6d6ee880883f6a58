"""Sparse FFNs: what leaving neurons out costs and gains, alone and under speculation."""
