"""Bytes as people say them, and whether memory has room for them."""

from pathlib import Path

from specsparse.errors import UserError


def size_text(nbytes: float) -> str:
    """Bytes as people say them: 3.8 GB, 325 MB, 12 kB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.{1 if nbytes < 10 * unit and name == 'GB' else 0}f} {name}"
    return f"{nbytes / 1e3:.0f} kB"


def memory_available() -> int | None:
    """Bytes of memory that a process can take now (/proc/meminfo); None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024


def need_memory(what: str, nbytes: int, instead: str) -> None:
    """Before it is made, or loaded: a system without room for it ends the process without a word.

    Args:
        what: is made, as the line begins: `--shapes 4096x11008: 1.2 GB of ...`.
        nbytes: of it, the most at one time.
        instead: what the user can do.

    Raises:
        UserError: `nbytes` are more than the memory that is available.
    """
    memory = memory_available()
    if memory is not None and nbytes > memory:
        raise UserError(
            f"{what}: {size_text(nbytes)} do not fit into the memory that is available, {size_text(memory)}: {instead}"
        )
