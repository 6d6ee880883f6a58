"""What `python -m specsparse bench` measures: prompts, decoding and v(n), beside the machine and the peers."""
