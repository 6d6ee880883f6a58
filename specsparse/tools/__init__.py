"""Commands that measure, judge, serve or look, a folder each. Nothing below imports them.

The `__init__` of a folder has the command's arguments and `main`, and imports no jax; the files beside it do the work.
"""
