"""Cost model: what a forward reads and computes, what devices can do, what this machine was measured to do, and why a
run was as fast as it was."""
