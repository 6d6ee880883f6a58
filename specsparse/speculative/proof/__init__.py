"""Losslessness by enumeration: exact distributions, cases, mutants, the certificate.

Of our own verifiers and the driver that runs them, of anybody's callable (`handed`), of mistakes by their public
reports (`museum`) and of other libraries' verifiers (`adapters`).
"""
