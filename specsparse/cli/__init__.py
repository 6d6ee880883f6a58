"""`python -m specsparse <command>`: each command is a thin module with `add_arguments(parser)` and `main(args) -> int`."""
