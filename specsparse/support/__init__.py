"""What every room uses: files, options, registries of names, interleaved timing, the terminal, citations."""
