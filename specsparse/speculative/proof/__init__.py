"""Losslessness by enumeration: exact distributions, cases, mutants, the certificate.

It covers our own verifiers and the driver that runs them, anybody's callable (`external`), mistakes by their public
reports (`known_bugs`) and other libraries' verifiers (`libraries`).
"""
