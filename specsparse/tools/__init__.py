"""Commands that measure, serve, judge or look: a folder each, whole. Nothing below imports them."""
