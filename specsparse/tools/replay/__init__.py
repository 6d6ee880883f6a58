"""Recorded rounds: traced, kept with their distributions, and judged again."""
