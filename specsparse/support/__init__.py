"""What every room uses and nothing that computes: files, options, names, timing in turn, the terminal, citations."""
