"""Spec-Bench's 480 questions (Xia et al. 2024, arXiv:2401.07851): where they lie, or from where they come.

They are not part of this project. The file is looked for beside the checkout and in the cache, then downloaded.
"""

import hashlib
from pathlib import Path

from specsparse.errors import UserError
from specsparse.support.files import cache_dir

NAME = "spec_bench"
URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
_FILE = Path("spec_bench") / "question.jsonl"
_SECONDS = 20


def places() -> list[Path]:
    """Where the file is looked for, in this order."""
    checkout = Path(__file__).resolve().parents[2]
    return [base / "shared" / "data" / _FILE for base in (checkout.parent, Path("..").resolve())] + [
        cache_dir() / _FILE
    ]


def questions() -> Path:
    """The file of questions, downloaded into the cache the first time.

    Raises:
        UserError: it is nowhere and cannot be downloaded, or what came is another file.
    """
    for path in places():
        if path.is_file():
            return path
    kept = cache_dir() / _FILE
    kept.parent.mkdir(parents=True, exist_ok=True)
    coming = kept.with_suffix(".part")
    coming.write_bytes(_download())
    return coming.replace(kept)


def _download() -> bytes:
    import urllib.request  # most runs download nothing

    hint = "download it elsewhere and give data.source=PATH/question.jsonl"
    try:
        with urllib.request.urlopen(URL, timeout=_SECONDS) as answer:
            data = answer.read()
    except OSError as error:
        raise UserError(f"Spec-Bench cannot be had from {URL} ({getattr(error, 'reason', error)}): {hint}") from None
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise UserError(f"{URL} is not the file of questions that was expected (another sha256): {hint}")
    return data
