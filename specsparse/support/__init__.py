"""What every room uses and nothing of the subject: files, paths, options, the terminal, citations."""
