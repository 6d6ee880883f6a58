"""Names of files and repositories of the Hub, in the forms of `models.hub`: which texts are one."""

import os
import re

SCHEME = "hf://"
REFERENCE = re.compile(
    r"(?P<scheme>hf://)?(?P<repo>\w[\w.-]*/[\w.-]+)"
    r"(?::(?P<tag>[\w.-]+)|/(?P<file>[^@:]+?)"
    r"|@(?P<before>refs/(?:pr|convert)/[^@/\s]+|[^@/\s]+)/(?P<named>[^@\s]+\.(?:gguf|json|safetensors|bin)))?"
    r"(?:@(?P<revision>[^@\s]+?))?/?"
)


def is_reference(text: str) -> bool:
    """True for a name of the Hub that is not one of this machine: hf://.., owner/repo, owner/repo:Q4_K_M."""
    if text.startswith(SCHEME):
        return True
    found = REFERENCE.fullmatch(text)
    plain = found is not None and found["file"] is None and not text.lower().endswith((".gguf", "/", "/..", "/."))
    return plain and not os.path.exists(text)
