"""Training: the target's own text; heads, block drafters, draft models and ReLU models made from it; their files."""
