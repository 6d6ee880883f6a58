"""JSON that every reader takes, in files that appear whole or not at all."""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from specsparse.support.atomic import atomically

Json: TypeAlias = dict[str, Any]
"""An object as JSON has it: reports, records, a config.json. Its maker's docstring says what is in it."""

_HALF = re.compile("[\ud800-\udfff]")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader (or a killed run) sees the old content or the new one, never half of it.

    Half a surrogate pair, as a file name that is no UTF-8 has, is written as a question mark.

    Raises:
        UserError: it cannot be written.
    """
    with atomically(path) as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        os.fsync(file.fileno())


def kept(path: Path) -> Json:
    """The object in a file that is kept to save time; {} where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def to_json(value: object, **options: Any) -> str:
    """JSON that every reader takes: numpy values as plain ones, NaN and infinity as null.

    Half a surrogate pair, as a file name that is no UTF-8 has, is written as its escape.
    """
    text = json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, **options)
    return text if is_unicode(text) else _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    return _HALF.search(text) is None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
