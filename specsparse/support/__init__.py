"""What every room uses and nothing of the subject: files, options, names, timing in turn, the terminal, citations."""
