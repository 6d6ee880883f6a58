"""`python -m specsparse <command>`: a command is a module with `add_arguments(parser)` and `main(args) -> int`."""
