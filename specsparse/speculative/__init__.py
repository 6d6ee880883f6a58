"""Speculative decoding: drafters, verifiers, trees, the loop, and the certificate that verification is exact."""
