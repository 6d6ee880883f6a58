"""Model files that `specsparse` finds by name; nothing here is code."""
