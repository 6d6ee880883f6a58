"""Look-up tables for four-bit products: a measured negative result, kept with its benchmark."""
