"""Products of packed weights on a GPU's matrix units."""
