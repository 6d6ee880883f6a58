"""Print the version, and the commit if specsparse runs from a checkout."""

import argparse
from importlib import metadata

from specsparse.support.files import git_commit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def main(args: argparse.Namespace) -> int:
    """Print one line."""
    try:
        version = metadata.version("specsparse")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    git = git_commit()
    commit = f" {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else ""
    print(f"specsparse {version}{commit}")
    return 0
