"""Recorded rounds: traced, kept with their laws, and judged again."""
