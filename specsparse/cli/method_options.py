"""The model and its drafter as options of a command."""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --drafter and --draft."""
    add = parser.add_argument
    add("model", nargs="?", default="smollm2-135m", help="a known name, a GGUF file or hf://owner/repo/file.gguf")
    add(
        "--drafter",
        default="prompt_lookup",
        metavar="NAME",
        help="as in configs; none for plain decoding (%(default)s)",
    )
    add("--draft", metavar="FILE", help="a draft model: the drafter is then model")


def drafter_of(drafter: str, draft: str | None) -> tuple[str, dict[str, Any]]:
    """Name and options of what these two say."""
    return (drafter, {}) if draft is None else ("model", {"model": draft})
