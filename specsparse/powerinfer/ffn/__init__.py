"""FFNs that leave neurons out."""
