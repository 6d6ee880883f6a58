"""A model at work: loading it, decoding batches with it, and what comes out."""
