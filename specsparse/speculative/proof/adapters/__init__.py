"""Verifiers of other libraries as callables of `proof.handed`, each in a file of its own."""
