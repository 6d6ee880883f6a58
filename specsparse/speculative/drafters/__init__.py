"""Drafters: what proposes tokens. `registry.get_drafter` makes one by name; importing this costs no jax."""

from specsparse.speculative.drafters.registry import get_drafter

__all__ = ["get_drafter"]
