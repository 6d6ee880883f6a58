"""Models of the catalogue that are not here yet: what they cost, whether they fit, and how they come.

wanted = {"model.path": entries.find("llama-2-7b"), "drafter.model": entries.find("llama-160m")}
obtain(wanted, "ask")        # says what it would download; asks on a terminal, refuses elsewhere
"""

import math
import os
import shutil
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specsparse.errors import UserError
from specsparse.models import catalogue, entries, hub
from specsparse.models.catalogue import NotHere
from specsparse.models.entries import Download, Entry
from specsparse.models.hub import RepoFile, Repository
from specsparse.support.files import kept, need_memory, size_text, to_json, write_atomically

_SPARE = 0.05  # of the disk that is needed
_KEPT = ("revision", "size", "sha256", "licence")


@dataclass(frozen=True)
class Plan:
    """What obtaining an entry takes.

    Attributes:
        entry: as the catalogue has it.
        repository: as the Hub has it.
        files: to download.
    """

    entry: Entry
    repository: Repository
    files: tuple[RepoFile, ...]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.size or 0 for file in self.files)

    @property
    def missing(self) -> int:
        """Bytes that are still to come."""
        return self.bytes - sum(hub.at_hand(self.repository.repo, file) for file in self.files)

    @property
    def loaded(self) -> int:
        """Bytes of the file that loads; of one that is to be made, at most."""
        return self.entry.size if self.entry.convert and self.entry.size else self.bytes

    @property
    def disk(self) -> int:
        """Bytes that the disk must have room for."""
        return self.missing + (self.loaded if self.entry.convert else 0)

    def __str__(self) -> str:
        at_hand = self.bytes - self.missing
        parts = [f"{len(self.files)} files, " if len(self.files) > 1 else "", size_text(self.bytes)]
        here = f" ({size_text(at_hand)} of it here)" if at_hand else ""
        made = f", converted to {self.entry.convert.upper()}" if self.entry.convert else ""
        licence = f", licence {self.repository.licence or 'not given'}"
        return f"{self.entry.name}: {''.join(parts)}{here} from {self.entry.url}{made}{licence}"


def path_of(spec: str | os.PathLike[str], download: Download = "ask") -> Path:
    """The file of a model as `catalogue.resolve` finds it, downloaded where it is a name of the Hub.

    Raises:
        UserError: as `catalogue.resolve` and `obtain`.
    """
    if download not in typing.get_args(Download):
        raise UserError(f"download={download!r} must be one of {', '.join(typing.get_args(Download))}")
    try:
        return catalogue.resolve(os.fspath(spec))
    except NotHere as missing:
        obtain(missing.wanted, download)
    return catalogue.resolve(os.fspath(spec))


def published(spec: str | os.PathLike[str], download: Download = "ask") -> Path:
    """The folder or file of a drafter: a path, a name of the catalogue, hf://owner/repo or a GGUF file of one.

    Raises:
        UserError: as `path_of` and `hub.download_checkpoint`.
    """
    text = os.fspath(spec)
    if text.startswith(hub.SCHEME) and hub.Reference.parse(text).file is None:
        return hub.download_checkpoint(text)
    return path_of(text, download)


def obtain(wanted: Mapping[str, Entry], download: Download, *, say: Callable[[str], None] | None = None) -> None:
    """Downloads and converts models that are not here.

    Args:
        wanted: entries of the Hub by the setting that names each.
        download: "yes", "no", or "ask".
        say: takes the lines that say what comes; stderr by default.

    Raises:
        NotHere: it is not to be downloaded, or there is no way to the Hub.
        UserError: no room on the disk or in memory, no access, another checksum, or a checkpoint that does not convert.
    """
    tell = say or (lambda line: print(line, file=sys.stderr, flush=True))
    if download == "no":
        raise NotHere(wanted, "download=no; ")
    try:
        plans = [plan(entry) for entry in wanted.values()]
    except hub.UnreachableError as error:
        raise NotHere(wanted, f"{str(error).rstrip('.')}; without a network ") from None
    check_room(plans)
    total = size_text(sum(one.missing for one in plans))
    if download == "ask" and not (sys.stdin.isatty() and sys.stderr.isatty()):
        each = ", ".join(f"{one.entry.name} {size_text(one.missing)}" for one in plans)
        raise NotHere(wanted, f"download=yes fetches {total} ({each}); or ")
    for one in plans:
        tell(str(one))
    if download == "ask" and not _agreed(total):
        raise NotHere(wanted, "not downloaded; ")
    for one in plans:
        _bring(one, tell)


def plan(entry: Entry) -> Plan:
    """What the Hub says of an entry; kept for the next time.

    Raises:
        UnreachableError: no way to the Hub.
        UserError: no such repository, revision or file; no access; another checksum than the entry has.
    """
    assert entry.repo is not None
    found = hub.look_up(entry.repo, entry.revision)
    if found.gated and not hub.has_token():
        raise UserError(
            f"{entry.name}: {entry.url} asks for consent and a token: accept its terms there, then set HF_TOKEN or "
            "run `hf auth login`"
        )
    files = found.matching(entry.file) if entry.file else found.checkpoint()
    if not files:
        names = ", ".join(file.name for file in found.files if file.name.endswith(".gguf")) or "no GGUF file"
        raise UserError(f"{entry.name}: {entry.url} has no {entry.file or 'checkpoint'}; it has {names}")
    if entry.sha256 and files[0].sha256 and entry.sha256 != files[0].sha256:
        raise UserError(
            f"{entry.name}: {files[0].name} on the Hub has another sha256 ({files[0].sha256[:12]}..) than the "
            f"catalogue ({entry.sha256[:12]}..): it is not the file that was meant"
        )
    one = Plan(entry, found, tuple(files))
    _keep(entry, revision=found.commit, licence=found.licence, sha256=files[0].sha256 if len(files) == 1 else None,
          size=None if entry.convert else one.bytes)  # fmt: skip
    return one


def check_room(plans: Sequence[Plan]) -> None:
    """Whether the disk and the memory have room.

    Raises:
        UserError: they have not, with how much is there and how much is needed.
    """
    folder = catalogue.model_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, math.ceil(sum(one.disk for one in plans) * (1 + _SPARE))
    if needed > free:
        raise UserError(
            f"{size_text(needed)} are needed on the disk of {there}, {size_text(free)} are free: make room, or set "
            "HF_HOME and SPECSPARSE_CACHE to folders of another disk"
        )
    loaded = sum(one.loaded for one in plans if one.entry.role != "head")
    what = f"the weights of {' and '.join(one.entry.name for one in plans)}"
    need_memory(what, loaded, "take a smaller model or a smaller type of weights")


def known(entry: Entry) -> Entry:
    """The entry with what the Hub has said of it before, where the catalogue is silent."""
    facts = kept(_facts_file(entry))
    if facts.get("repo") != entry.repo:
        return entry
    return replace(entry, **{key: facts.get(key) for key in _KEPT if getattr(entry, key) is None})


def _keep(entry: Entry, **facts: str | int | None) -> None:
    shipped = entries.find(entry.name)
    if shipped != entry:
        return
    before = {key: getattr(known(entry), key) for key in _KEPT}
    told = {key: value for key, value in facts.items() if value is not None}
    write_atomically(_facts_file(entry), to_json({"repo": entry.repo, **before, **told}) + "\n")


def _facts_file(entry: Entry) -> Path:
    return catalogue.model_folder() / f"{entry.name}.hub.json"


def _agreed(total: str) -> bool:
    """Asks on the terminal."""
    print(f"Download {total}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _bring(one: Plan, tell: Callable[[str], None]) -> None:
    """Downloads the files of a plan, converts them where that is asked for."""
    entry = one.entry
    revision = f"@{entry.revision}" if entry.revision else ""
    reference = f"{hub.SCHEME}{entry.repo}{revision}"
    if entry.convert is None:
        if entry.file:
            path = hub.download(f"{hub.SCHEME}{entry.repo}/{one.files[0].name}{revision}")
        else:
            path = hub.download_checkpoint(reference)
        tell(f"{entry.name}: {path}")
        return
    from rich.console import Console  # these are what a model that is here needs not wait for

    from specsparse.models.convert.hf import convert_hf
    from specsparse.support import terminal

    folder, path = hub.download_checkpoint(reference), catalogue.model_folder() / entry.files[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with terminal.loading(Console(stderr=True), f"converting {entry.name}") as progress:
        convert_hf(folder, path, type_name=entry.convert, progress=progress)
    _keep(entry, size=path.stat().st_size)
    tell(f"{entry.name}: converted, {size_text(path.stat().st_size)}: {path}")
