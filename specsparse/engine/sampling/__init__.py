"""Distributions made of logits, and tokens drawn from them."""
