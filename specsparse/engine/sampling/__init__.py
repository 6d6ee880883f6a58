"""From logits to a law, from a law to a token."""
