"""Verifiers of other libraries as callables of `proof.external`, each in a file of its own."""
