"""A dense model divided among devices."""
