"""From logits to a distribution, from a distribution to a token."""
