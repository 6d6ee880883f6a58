"""Names under which the cost of a drafter is kept; a stamp tells a file from the one that was there before."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specsparse.models import catalogue
from specsparse.speculative.drafters.registry import DRAFTERS, takes
from specsparse.support.options import as_yaml, values_of
from specsparse.support.registry import Registry, source_of


def cost_key(name: str, options: Mapping[str, object] | None = None, *, among: Registry[Any] = DRAFTERS) -> str:
    """The name under which a drafter's cost is kept: its own, and the options that are not its defaults.

    A file among them is told from what was there before by a stamp (size and time).

    Args:
        name: of the drafter, as in configs.
        options: of it; None is one that was not given.
        among: the registry of the name, where it is no drafter's.

    Raises:
        UserError: a draft model or a head that is not there.
    """
    defaults = values_of(among.read(name, {})) if among.is_builtin(name) else {}
    given = {
        key: value
        for key, value in sorted((options or {}).items())
        if value is not None and as_yaml(value) != defaults.get(key)
    }
    words = []
    for key, value in given.items():
        file = file_of(key, value)
        words.append(f"{key}={value}" + (f" #{stamp([file])}" if file else ""))
    if ":" in name:
        words.append(f"#{stamp(source_of(name))}")
    elif "head" in takes(name) - given.keys():
        words.append(f"head=shipped #{shipped_heads()}")
    return f"{name} ({', '.join(words)})" if words else name


def stamp(paths: Iterable[Path]) -> str:
    """Eight hex digits of names, sizes in bytes and modification times in ns."""
    stats = [(path.name, path.stat()) for path in sorted(paths)]
    known = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]


def shipped_heads() -> str:
    """Of the heads that come with the package, of which a target finds its own."""
    from specsparse.speculative.drafters.heads.head_file import SHIPPED

    return stamp(SHIPPED.glob("*.gguf"))


def file_of(option: str, value: object) -> Path | None:
    """The file that a drafter's option names; None where it names none.

    Raises:
        UserError: a draft model or a head that is not there.
    """
    if not isinstance(value, str | Path):
        return None
    if option == "model":
        return catalogue.resolve(value)
    if option == "head":
        from specsparse.speculative.drafters.heads.head_file import find

        return find(value, None)
    if option == "path":
        return Path(value).expanduser() if os.path.exists(os.path.expanduser(value)) else None
    return Path(value).expanduser() if os.path.isfile(os.path.expanduser(value)) else None
