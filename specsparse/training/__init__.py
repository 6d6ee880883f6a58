"""Models of one's own: text of the target's own making, heads trained on it, files that the engine reads."""
