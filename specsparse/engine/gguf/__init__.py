"""GGUF files: reading, requantising, telling them apart."""
