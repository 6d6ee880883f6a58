"""Which neurons lie on the accelerator, and a model carried out so."""
