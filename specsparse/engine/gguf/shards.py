"""Names of the files of a split model; looking for one needs no reader, and so no numpy."""

import re

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
"""The names that llama.cpp gives to the files of a split model: `stem-00001-of-00003.gguf`."""


def shard_names(name: str) -> list[str]:
    """The names of all files of a split model, of the name of one of them; empty for any other name."""
    found = _SHARD.fullmatch(name)
    count = int(found["count"]) if found else 0
    return [f"{found['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)] if found else []
