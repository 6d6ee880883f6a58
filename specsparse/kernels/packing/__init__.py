"""GGUF bytes into the kernels' layouts, and back."""
