"""GGUF files: reading, writing, requantising, telling them apart."""
