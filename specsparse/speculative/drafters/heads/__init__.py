"""Drafters on the target's features: heads of EAGLE 1 to 3 and DFlash blocks, their files and their functions."""
