"""Downloads and converts models of the catalogue that are not here yet, if disk and memory have room for them.

wanted = {"model.path": catalogue.find("llama-2-7b"), "drafter.model": catalogue.find("llama-160m")}
obtain(wanted, "ask")        # says what it would download; asks on a terminal, refuses elsewhere
"""

import math
import os
import shutil
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specsparse.errors import UserError
from specsparse.models import catalogue, hub
from specsparse.models.catalogue import Download, Entry, NotHere
from specsparse.models.hub import RepoFile, Repository
from specsparse.support.files import kept, need_memory, size_text, to_json, write_atomically

_SPARE = 0.05  # of the disk that is needed
_KEPT = ("revision", "size", "sha256", "licence")


@dataclass(frozen=True)
class DownloadPlan:
    """An entry of the catalogue, its repository as the Hub has it, and the files to download."""

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

    def __str__(self) -> str:
        at_hand = self.bytes - self.missing
        several = f"{len(self.files)} files, " if len(self.files) > 1 else ""
        here = f" ({size_text(at_hand)} of it here)" if at_hand else ""
        made = f", converted to {self.entry.convert.upper()}" if self.entry.convert else ""
        size, licence = f"{several}{size_text(self.bytes)}{here}", self.repository.licence or "not given"
        return f"{self.entry.name}: {size} from {self.entry.url}{made}, licence {licence}"


def path_of(spec: str | os.PathLike[str], download: Download = "ask") -> Path:
    """The file of a model as `catalogue.resolve` finds it, downloaded if it is a name of the Hub; raises as both do."""
    if download not in typing.get_args(Download):
        raise UserError(f"download={download!r} must be one of {', '.join(typing.get_args(Download))}")
    try:
        return catalogue.resolve(os.fspath(spec))
    except NotHere as missing:
        obtain(missing.wanted, download)
    return catalogue.resolve(os.fspath(spec))


def published(spec: str | os.PathLike[str], download: Download = "ask") -> Path:
    """The folder or file of a drafter: a path, a name of the catalogue, hf://owner/repo or a GGUF file of one."""
    text = os.fspath(spec)
    if text.startswith(hub.SCHEME) and hub.Reference.parse(text).file is None:
        return hub.download_checkpoint(text)
    return path_of(text, download)


def obtain(wanted: Mapping[str, Entry], download: Download) -> None:
    """Downloads and converts models that are not here; says on stderr what comes.

    Args:
        wanted: entries of the Hub by the setting that names each.
        download: "yes", "no", or "ask".

    Raises:
        NotHere: it is not to be downloaded, or the Hub cannot be reached.
        UserError: no room on the disk or in memory, no access, another checksum, or a checkpoint that does not convert.
    """
    if download == "no":
        raise NotHere(wanted, "download=no; ")
    try:
        plans = [plan(entry) for entry in wanted.values()]
    except hub.UnreachableError as error:
        raise NotHere(wanted, f"{str(error).rstrip('.')}; without a network ") from None
    _check_room(plans)
    total = size_text(sum(one.missing for one in plans))
    if download == "ask" and not (sys.stdin.isatty() and sys.stderr.isatty()):
        each = ", ".join(f"{one.entry.name} {size_text(one.missing)}" for one in plans)
        raise NotHere(wanted, f"download=yes fetches {total} ({each}); or ")
    for one in plans:
        _say(str(one))
    if download == "ask":
        print(f"Download {total}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise NotHere(wanted, "not downloaded; ")
    for one in plans:
        _fetch(one)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def plan(entry: Entry) -> DownloadPlan:
    """Asks the Hub for an entry and keeps what it says for the next time.

    Raises:
        UnreachableError: the Hub cannot be reached.
        UserError: no such repository, revision or file; no access; another checksum than the entry has.
    """
    from huggingface_hub import get_token

    assert entry.repo is not None
    found = hub.look_up(entry.repo, entry.revision)
    if found.gated and get_token() is None:
        then = "accept its terms there, then set HF_TOKEN or run `hf auth login`"
        raise UserError(f"{entry.name}: {entry.url} asks for consent and a token: {then}")
    files = found.matching(entry.file) if entry.file else found.checkpoint()
    if not files:
        names = ", ".join(file.name for file in found.files if file.name.endswith(".gguf")) or "no GGUF file"
        raise UserError(f"{entry.name}: {entry.url} has no {entry.file or 'checkpoint'}; it has {names}")
    if entry.sha256 and files[0].sha256 and entry.sha256 != files[0].sha256:
        raise UserError(
            f"{entry.name}: {files[0].name} on the Hub has another sha256 ({files[0].sha256[:12]}..) than the "
            f"catalogue ({entry.sha256[:12]}..): it is not the file that was meant"
        )
    one = DownloadPlan(entry, found, tuple(files))
    _keep(entry, revision=found.commit, licence=found.licence, sha256=files[0].sha256 if len(files) == 1 else None,
          size=None if entry.convert else one.bytes)  # fmt: skip
    return one


def _check_room(plans: Sequence[DownloadPlan]) -> None:
    """UserError if disk or memory lack room, with how much is there and how much is needed."""
    folder = catalogue.model_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    needed = sum(one.missing + (one.loaded if one.entry.convert else 0) for one in plans)
    free, needed = shutil.disk_usage(there).free, math.ceil(needed * (1 + _SPARE))
    if needed > free:
        raise UserError(
            f"{size_text(needed)} are needed on the disk of {there}, {size_text(free)} are free: make room, or set "
            "HF_HOME and SPECSPARSE_CACHE to folders of another disk"
        )
    loaded = sum(one.loaded for one in plans if one.entry.role != "head")
    what = f"the weights of {' and '.join(one.entry.name for one in plans)}"
    need_memory(what, loaded, "take a smaller model or a smaller type of weights")


def known(entry: Entry) -> Entry:
    """The entry, its gaps filled with what the Hub has said of it before."""
    facts = kept(_facts_file(entry))
    if facts.get("repo") != entry.repo:
        return entry
    return replace(entry, **{key: facts.get(key) for key in _KEPT if getattr(entry, key) is None})


def _keep(entry: Entry, **facts: str | int | None) -> None:
    if catalogue.find(entry.name) != entry:
        return
    before = {key: getattr(known(entry), key) for key in _KEPT}
    told = {key: value for key, value in facts.items() if value is not None}
    write_atomically(_facts_file(entry), to_json({"repo": entry.repo, **before, **told}) + "\n")


def _facts_file(entry: Entry) -> Path:
    return catalogue.model_folder() / f"{entry.name}.hub.json"


def _fetch(one: DownloadPlan) -> None:
    """Downloads the files of a plan and converts a checkpoint."""
    entry = one.entry
    file = one.files[0].name if entry.file else None
    reference = hub.Reference(str(entry.repo), file, entry.revision)
    folder = hub.download(str(reference)) if file else hub.download_checkpoint(str(reference))
    if entry.convert is None:
        _say(f"{entry.name}: {folder}")
        return
    from rich.console import Console  # a model that is here needs not wait for these

    from specsparse.models.convert.hf import convert_hf
    from specsparse.support import terminal

    path = catalogue.model_folder() / entry.files[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with terminal.loading(Console(stderr=True), f"converting {entry.name}") as progress:
        convert_hf(folder, path, type_name=entry.convert, progress=progress)
    _keep(entry, size=path.stat().st_size)
    _say(f"{entry.name}: converted, {size_text(path.stat().st_size)}: {path}")
