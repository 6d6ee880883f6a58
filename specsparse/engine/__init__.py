"""The engine: GGUF models, their forward pass, sampling, and decoding without speculation."""
