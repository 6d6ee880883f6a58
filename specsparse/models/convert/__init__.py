"""Files of other programs into GGUF files that run here and in llama.cpp, and GGUF files into others."""
