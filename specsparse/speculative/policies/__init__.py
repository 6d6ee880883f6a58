"""How many tokens to draft in a round."""
