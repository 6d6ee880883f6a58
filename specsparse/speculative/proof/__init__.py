"""Losslessness by enumeration: exact laws, cases, mutants, the certificate."""
