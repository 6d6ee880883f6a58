"""Other engines, each in a process of its own: llama.cpp, ik_llama.cpp and transformers on the same file as ours."""
