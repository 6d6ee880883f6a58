"""Which neurons belong on the accelerator: counted activations, placements by every rule, and one carried out."""
