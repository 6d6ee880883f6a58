"""The same model in another type of weights, to measure speed by type."""

from pathlib import Path

from rich.console import Console

from specsparse.engine.gguf import requantise
from specsparse.engine.gguf.reader import open_gguf
from specsparse.runtime import manifest
from specsparse.support import terminal


def requantised(path: Path, name: str, out: Console) -> Path:
    """The file of the same model in another type, made once and kept in the user's cache."""
    kind = requantise.kind_of(name)
    source = open_gguf(path)
    digest = manifest.sha256_of(path)[:12]
    made = manifest.cache_dir() / "requantised" / f"{path.stem}-{digest}-as-{kind.name}.gguf"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with terminal.counting(out, f"re-quantising to {kind.name}", 100) as progress:

            def advance(done: int, total: int) -> None:
                progress.update(progress.task_ids[0], completed=100 * done // total)

            requantise.requantise(source, made, kind, progress=advance)
    return made
