"""A file of the Hub by name -> a file on this machine, by huggingface_hub.

    owner/repo, owner/repo:Q4_K_M           the GGUF of the repository, the one of that type
    hf://owner/repo@revision/file.gguf      huggingface_hub's own form of a file
    hf://owner/repo/file.gguf@revision      the same

`hf://` may stand before all of them; a file or folder of this machine goes before a name without it.
Its own settings hold: HF_HOME, HF_TOKEN or the token of `hf auth login`, HF_ENDPOINT for a mirror, HF_HUB_OFFLINE=1 for
files in the cache only. Files are kept in its cache. The download of a large file goes on from its last byte, also in
the next run after one that was stopped, and its content is compared with the sha256 that the Hub names. The header of a
GGUF file comes without the weights: its first megabytes, in a file with a hole for the rest.
"""

import fnmatch
import functools
import hashlib
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from specsparse.engine.gguf.shards import shard_names
from specsparse.errors import UserError
from specsparse.support.files import atomically, cache_dir
from specsparse.support.hub_names import REFERENCE, SCHEME
from specsparse.support.options import shown

FORM = "owner/repo, owner/repo:Q4_K_M or hf://owner/repo/file.gguf, perhaps with @revision"
_USUAL = ("Q4_K_M", "Q4_0", "Q8_0")
"""Types of a repository's GGUF files that are taken if none is asked for, the first that there is; llama.cpp begins
with the same one."""
_BESIDE_WEIGHTS = ("*.json", "tokenizer.model", "*.jinja")
_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")  # the first that there is
_PARTIAL = ".partial"
_ASK_SECONDS = 10
FIRST_BYTES, MOST_BYTES = 1 << 20, 1 << 27
"""Bytes of a header that are asked for at first, and at most; most of it is the vocabulary, some megabytes."""
_T = TypeVar("_T")


class HubError(UserError):
    """A reference that is wrong, or that the Hub refuses. The line is the reference, then `why`."""

    def __init__(self, wanted: object, why: str):
        super().__init__(f"{wanted}: {why}")
        self.why = why


class UnreachableError(HubError):
    """The Hub cannot be reached: no network, no such mirror, or HF_HUB_OFFLINE."""


@dataclass(frozen=True)
class RepoFile:
    """A file as the Hub lists it: its path in the repository; bytes and sha256 if the Hub says them."""

    name: str
    size: int | None
    sha256: str | None


@dataclass(frozen=True)
class Repository:
    """A repository at a revision, as the Hub describes it; `gated` if it asks for consent."""

    repo: str
    commit: str
    licence: str | None
    gated: bool
    files: tuple[RepoFile, ...]

    def matching(self, pattern: str) -> list[RepoFile]:
        """The file of a name, or the first of a pattern; of a split model all parts."""
        names = {file.name: file for file in self.files}
        first = pattern if pattern in names else next((n for n in sorted(names) if fnmatch.fnmatch(n, pattern)), None)
        return [] if first is None else [names[part] for part in parts(first) if part in names]

    def checkpoint(self) -> list[RepoFile]:
        """The files of a checkpoint: weights in safetensors, else in PyTorch's form, configuration and tokenizer."""
        root = [file for file in self.files if "/" not in file.name]
        weights = ([file for file in root if fnmatch.fnmatch(file.name, pattern)] for pattern in _WEIGHTS)
        beside = [file for file in root if any(fnmatch.fnmatch(file.name, pattern) for pattern in _BESIDE_WEIGHTS)]
        found = next(filter(None, weights), [])
        return [*found, *beside] if found else []

    def models(self) -> tuple[str, ...]:
        """The names of its GGUF models, the shortest paths first, without image projectors and importance matrices."""
        names = sorted((file.name for file in self.files), key=lambda name: (name.count("/"), name))
        beside = re.compile("mmproj|imatrix", re.IGNORECASE)
        return tuple(name for name in names if name.lower().endswith(".gguf") and not beside.search(name))


@dataclass(frozen=True)
class Reference:
    """A file of a repository, or without `file` the whole of it, or its file of the type `tag`.

    A revision of None is the main branch; `text` is how the user wrote it.
    """

    repo: str
    file: str | None
    revision: str | None
    tag: str | None = None
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Reads the forms of this module; HubError if the text has another one."""
        found = REFERENCE.fullmatch(text)
        if found is None or (found["before"] and found["revision"]) or (found["file"] and not found["scheme"]):
            raise HubError(text, f"is no reference to the Hub; the form is {FORM}")
        revision = found["before"] or found["revision"]
        file = found["file"] or found["named"]
        if (
            not {"", ".", ".."}.isdisjoint((file or "x").split("/") + (revision or "x").split("/"))
            or not text.isprintable()
        ):
            raise HubError(shown(text), f"is no file of a repository; the form is {FORM}")
        return cls(found["repo"], file, revision and urllib.parse.unquote(revision), found["tag"], text)

    def __str__(self) -> str:
        named = (f":{self.tag}" if self.tag else "") + (f"/{self.file}" if self.file else "")
        return self.text or f"{SCHEME}{self.repo}{named}{f'@{self.revision}' if self.revision else ''}"

    def with_file(self, found: Repository | None = None) -> "Reference":
        """The reference with the file that is meant, if it names none: the one of its type, else of the usual one, else
        the first. `found` is the repository, if the Hub was asked for it."""
        if self.file is not None:
            return self
        try:
            names = _gguf_names(self.repo, self.revision, endpoint()) if found is None else found.models()
        except UnreachableError as error:  # files in the cache that were fetched before
            here = cached("**/*.gguf", repo=self.repo)
            names = tuple(path.as_posix().partition("/snapshots/")[2].partition("/")[2] for path in here)
            if not names:
                why = f"nothing of it is in the cache, and {error.why}; give a GGUF file"
                raise UnreachableError(self, why) from None
        for tag in (self.tag,) if self.tag else (*_USUAL, ""):
            fits = re.compile(rf"(?:.*[-._/])?{re.escape(tag)}(?:-\d+-of-\d+)?\.gguf", re.IGNORECASE) if tag else None
            file = next((n for n in names if parts(n)[0] == n and (fits is None or fits.fullmatch(n))), None)
            if file:
                return replace(self, file=file)
        what = f"no file of the type {self.tag}" if self.tag else "names no file"
        raise HubError(self, f"{what}; {_choices(self)}")


@functools.cache
def _gguf_names(repo: str, revision: str | None, endpoint: str | None) -> tuple[str, ...]:
    """The GGUF models of a repository, asked for once."""
    return look_up(repo, revision).models()


def download(text: str) -> Path:
    """The file of a reference, downloaded if it is not in the cache; of a sharded model the first shard. HubError:
    another form; no such repository, revision or file; no access; no connection."""
    return _files(Reference.parse(text).with_file())


def look_up(repo: str, revision: str | None = None) -> Repository:
    """Asks the Hub for a repository; UnreachableError without a connection, HubError for a wrong name or no access."""
    from huggingface_hub import HfApi

    wanted = Reference(repo, None, revision)
    if offline():
        raise UnreachableError(wanted, "HF_HUB_OFFLINE forbids to ask the Hub")
    api = HfApi(endpoint=endpoint())
    found = _explained(
        wanted, lambda: api.model_info(repo, revision=revision, files_metadata=True, timeout=_ASK_SECONDS)
    )
    files = tuple(
        RepoFile(f.rfilename, f.size, f.lfs.sha256 if f.lfs is not None else None) for f in found.siblings or ()
    )
    licence = next((tag.partition(":")[2] for tag in found.tags or () if tag.startswith("license:")), None)
    return Repository(repo, str(found.sha), licence, bool(found.gated), files)


def download_checkpoint(text: str) -> Path:
    """The folder of a repository's weights, configuration and tokenizer: `owner/repo[@revision]`; HubError as in
    `download`."""
    wanted = Reference.parse(text)
    if wanted.file is not None or wanted.tag is not None:
        raise HubError(text, "a repository is needed, hf://owner/repo, not a file of it")
    if offline():
        from huggingface_hub import snapshot_download

        options = {"revision": wanted.revision, "local_files_only": True}
        return Path(_explained(wanted, lambda: snapshot_download(wanted.repo, **options)))
    folder = _checkpoint(wanted, look_up(wanted.repo, wanted.revision))
    if folder is None:
        raise HubError(wanted, "holds no checkpoint: no safetensors and no pytorch_model.bin")
    return folder


def download_drafter(text: str) -> Path:
    """The checkpoint of a repository, or its GGUF file if it has no checkpoint; that of the cache without a connection.
    HubError as in `download`."""
    from huggingface_hub import try_to_load_from_cache

    wanted = Reference.parse(text)
    try:
        found = look_up(wanted.repo, wanted.revision)
    except UnreachableError:
        config = try_to_load_from_cache(wanted.repo, "config.json", revision=wanted.revision)
        return Path(config).parent if isinstance(config, str) else download(text)
    return _checkpoint(wanted, found) or _files(wanted.with_file(found))


def download_header(text: str) -> Path:
    """A file of the whole size that holds the header alone; of a split model the first of such files.

    A file that is in the Hub's cache is returned as it is. Weights read as zeros: for `engine.gguf.reader.open_gguf`
    and for nothing that decodes. HubError: as `download`, or a file whose header is damaged.
    """
    wanted = Reference.parse(text).with_file()
    if offline():
        return download(text)  # from the cache, or the reason why there is nothing
    names = parts(str(wanted.file))
    here = [next(cached(name, repo=wanted.repo), None) for name in names]
    if wanted.revision is None and here[0] is not None and all(here):
        return here[0]
    paths = [_header(wanted, name) for name in names]
    return paths[0]


def is_header(path: Path) -> bool:
    """True for a header without weights, as `download_header` makes it."""
    return cache_dir() / "headers" in path.parents


def _header(wanted: Reference, name: str) -> Path:
    """The header of one file, asked for in growing pieces until it is whole."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    from specsparse.engine.gguf.reader import open_one

    url = hf_hub_url(wanted.repo, name, revision=wanted.revision, endpoint=endpoint())
    facts = _explained(wanted, lambda: get_hf_file_metadata(url, endpoint=endpoint()))
    if not facts.size:
        raise HubError(wanted, f"the Hub does not say how large {name} is: give the downloaded file")

    def get(start: int, end: int) -> bytes:
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        answer = get_session().get(url, headers=headers)
        hf_raise_for_status(answer)
        if answer.status_code != 206 or len(answer.content) != end - start:
            raise OSError(f"a part of {name} was asked for, and something else came")
        return answer.content

    content = hashlib.sha256(f"{wanted.repo} {wanted.file} {facts.etag}".encode()).hexdigest()[:16]
    path = cache_dir() / "headers" / content / Path(name).name
    known, partial = b"", path.with_name(path.name + _PARTIAL)
    while not path.is_file():
        start, end = len(known), min(max(2 * len(known), FIRST_BYTES), facts.size)
        known += _explained(wanted, lambda start=start, end=end: get(start, end))
        with atomically(partial) as file:
            file.write(known)
            file.truncate(facts.size)
        try:
            layout = open_one(partial).layout
            damage = None if layout is None or layout.data <= len(known) else "its header is longer than was asked for"
        except UserError as error:
            damage = str(error).removeprefix(f"{partial}: ")
        if damage is None:
            partial.rename(path)
        elif len(known) >= min(facts.size, MOST_BYTES):
            partial.unlink()
            raise HubError(wanted, damage)
    return path


def cached(name: str, *, repo: str | None = None) -> Iterator[Path]:
    """Files of that name, or pattern, in the Hub's cache, of one repository or of all."""
    folder = "*" if repo is None else repo.replace("/", "--")
    yield from (path for path in sorted(_cache().glob(f"models--{folder}/snapshots/*/{name}")) if path.is_file())


def at_hand(repo: str, file: RepoFile) -> int:
    """Bytes of a large file in the cache; a download that was stopped counts as far as it came."""
    blob = _blob(repo, file.sha256 or "")
    for path in (blob, blob.with_name(blob.name + _PARTIAL)):
        if file.sha256 and path.is_file():
            return path.stat().st_size
    return 0


def _cache() -> Path:
    """The Hub's cache, found without its library if that is not loaded: importing it takes a while."""
    loaded = sys.modules.get("huggingface_hub.constants")
    if loaded is not None:
        return Path(loaded.HF_HUB_CACHE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _blob(repo: str, sha256: str) -> Path:
    return _cache() / f"models--{repo.replace('/', '--')}" / "blobs" / sha256


def parts(name: str) -> list[str]:
    """The name, or of a split model those of all its files."""
    folder, _, last = name.rpartition("/")
    return [f"{folder}/{shard}" if folder else shard for shard in shard_names(last)] or [name]


def _checkpoint(wanted: Reference, found: Repository) -> Path | None:
    """The folder of its checkpoint, or None if it has none."""
    paths = [_file(wanted, file.name) for file in found.checkpoint()]
    return paths[0].parent if paths else None


def _files(wanted: Reference) -> Path:
    """The file; of a split model the first, and all are fetched."""
    paths = [_file(wanted, part) for part in parts(str(wanted.file))]
    return paths[0]


def _file(wanted: Reference, name: str) -> Path:
    """A file of the repository, by way of the cache."""
    from huggingface_hub import hf_hub_download

    options = {"revision": wanted.revision, "local_files_only": offline(), "endpoint": endpoint()}
    if not offline():
        _explained(wanted, lambda: _fetch_large(wanted, name))
    return Path(_explained(wanted, lambda: hf_hub_download(wanted.repo, name, **options)))


def _fetch_large(wanted: Reference, name: str) -> None:
    """Puts a large file that is not in the cache where the library finds it, or HubError if its sha256 is wrong.

    The library itself begins anew after every stop, and does not compare the content with its sha256.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    if isinstance(try_to_load_from_cache(wanted.repo, name, revision=wanted.revision), str):
        return
    url = hf_hub_url(wanted.repo, name, revision=wanted.revision, endpoint=endpoint())
    found = get_hf_file_metadata(url, endpoint=endpoint())
    sha256 = found.etag or ""
    is_large = re.fullmatch("[0-9a-f]{64}", sha256) is not None
    if not is_large or found.size is None or found.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    blob = _blob(wanted.repo, sha256)
    partial = blob.with_name(blob.name + _PARTIAL)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(partial.with_name(partial.name + ".lock")):
        if blob.exists():
            return
        with partial.open("ab") as file:
            if file.tell() > found.size:
                file.truncate(0)
            http_get(
                url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=found.size,
                displayed_filename=name,
            )  # fmt: skip
        with partial.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        if content != sha256:
            partial.unlink()
            other = f"{name} came with another sha256 than the Hub names ({sha256[:12]}..)"
            raise HubError(wanted, f"{other}: it was removed; run the command again")
        partial.rename(blob)


def offline() -> bool:
    """True if the network is switched off (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def endpoint() -> str | None:
    """The mirror to use in place of huggingface.co (HF_ENDPOINT), or None."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _explained(wanted: Reference, get: Callable[[], _T]) -> _T:
    """`get()`, with its errors as one line that says what to do."""
    from huggingface_hub import errors

    failures: tuple[type[Exception], ...] = (errors.EntryNotFoundError, errors.HfHubHTTPError, OSError, ValueError)
    failures += errors.HfHubHTTPError.__bases__  # of whatever HTTP library it uses
    try:
        return get()
    except failures as error:
        kind, first_line = HubError, (str(error) or type(error).__name__).splitlines()[0]
        match error:
            case errors.GatedRepoError():
                page = f"{endpoint() or 'https://huggingface.co'}/{wanted.repo}"
                why = f"asks for consent: accept its terms at {page}, then `hf auth login`"
            case errors.RepositoryNotFoundError():
                advice = "check the name; a private one needs `hf auth login` or HF_TOKEN"
                why = f"no repository {wanted.repo}, or no access to it: {advice}"
            case errors.RevisionNotFoundError():
                why = f"the repository has no revision {wanted.revision}"
            case errors.LocalEntryNotFoundError() if offline():
                kind, why = UnreachableError, "is not in the cache, and HF_HUB_OFFLINE forbids to download it"
            case errors.LocalEntryNotFoundError():
                cause = str(error.__cause__ or error).splitlines()[0]
                kind, why = UnreachableError, f"the Hub cannot be reached: {cause}"
            case errors.EntryNotFoundError():
                why = f"no such file; {_choices(wanted)}"
            case _ if not isinstance(error, OSError | ValueError) and "connect" in type(error).__name__.lower():
                kind, why = UnreachableError, f"the Hub cannot be reached: {first_line}"
            case _:
                why = f"the download failed: {first_line}; run the command again"
        raise kind(wanted, why) from None


def _choices(wanted: Reference) -> str:
    """The GGUF files of the repository, or the form of a name if they cannot be listed."""
    try:
        names = [file.name for file in look_up(wanted.repo, wanted.revision).files]
    except UserError:
        return f"the form is {FORM}"
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    if not files:
        make = f"`specsparse convert hf {wanted.repo} OUT.gguf` makes one of safetensors"
        return f"{wanted.repo} has no GGUF file; {make}"
    more = f" and {len(files) - 6} more" if len(files) > 6 else ""
    return f"{wanted.repo} has {', '.join(files[:6])}{more}"
