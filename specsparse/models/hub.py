"""`hf://owner/repo/file.gguf[@revision]` -> a file on this machine, by huggingface_hub.

Its own settings hold: HF_HOME, HF_TOKEN or the token of `hf auth login`, HF_ENDPOINT for a mirror, HF_HUB_OFFLINE=1 for
what is in the cache only. Files are kept in its cache. A large file is taken up where it was, also by the next run
after one that was stopped, and is compared with the sha256 that the Hub names.
"""

import fnmatch
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from specsparse.engine.gguf.shards import shard_names
from specsparse.errors import UserError

SCHEME = "hf://"
FORM = "hf://owner/repo/file.gguf, perhaps with @revision behind it"
_BESIDE_WEIGHTS = ("*.json", "tokenizer.model", "*.jinja")
_WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")  # the first that there is
_PARTIAL = ".partial"
_ASK_SECONDS = 10
_REFERENCE = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^@]+?))?(?:@(?P<revision>[^@\s]+))?/?")
_T = TypeVar("_T")


class UnreachableError(UserError):
    """There is no way to the Hub: no network, no such mirror, or HF_HUB_OFFLINE."""


@dataclass(frozen=True)
class RepoFile:
    """A file as the Hub lists it.

    Attributes:
        name: path inside the repository.
        size: bytes, where the Hub says.
        sha256: of large files.
    """

    name: str
    size: int | None
    sha256: str | None


@dataclass(frozen=True)
class Repository:
    """What the Hub says of a repository at a revision.

    Attributes:
        repo: "owner/name".
        commit: of the revision.
        licence: as its card says.
        gated: it asks for consent.
        files: all of them.
    """

    repo: str
    commit: str
    licence: str | None
    gated: bool
    files: tuple[RepoFile, ...]

    def matching(self, pattern: str) -> list[RepoFile]:
        """The files that a name or a pattern means; of a split model all parts."""
        names = {file.name: file for file in self.files}
        first = pattern if pattern in names else next((n for n in sorted(names) if fnmatch.fnmatch(n, pattern)), None)
        return [] if first is None else [names[part] for part in parts(first) if part in names]

    def checkpoint(self) -> list[RepoFile]:
        """The files of a checkpoint: weights in safetensors, else in PyTorch's form, configuration and tokenizer."""
        root = [file for file in self.files if "/" not in file.name]
        weights = ([file for file in root if fnmatch.fnmatch(file.name, pattern)] for pattern in _WEIGHTS)
        beside = [file for file in root if any(fnmatch.fnmatch(file.name, pattern) for pattern in _BESIDE_WEIGHTS)]
        return [*next(filter(None, weights), []), *beside]


@dataclass(frozen=True)
class Reference:
    """A file of a repository.

    Attributes:
        repo: "owner/name".
        file: path inside it; None for the whole repository.
        revision: branch, tag or commit; None for the main branch.
    """

    repo: str
    file: str | None
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Reads a reference.

        Raises:
            UserError: it has another form.
        """
        found = _REFERENCE.fullmatch(text)
        if found is None:
            raise UserError(f"{text}: is no reference to the Hub; the form is {FORM}")
        return cls(found["repo"], found["file"], found["revision"])

    def __str__(self) -> str:
        path = f"{self.repo}/{self.file}" if self.file else self.repo
        return f"{SCHEME}{path}" + (f"@{self.revision}" if self.revision else "")


def download(text: str) -> Path:
    """The file that a reference names, downloaded where it is not in the cache; of a sharded model the first shard.

    Args:
        text: `hf://owner/repo/file.gguf[@revision]`.

    Raises:
        UserError: another form; no such repository, revision or file; no access; no connection.
    """
    wanted = Reference.parse(text)
    if wanted.file is None:
        raise UserError(f"{text}: names no file; {_choices(wanted)}")
    paths = [_file(wanted, part) for part in parts(wanted.file)]
    return paths[0]


def look_up(repo: str, revision: str | None = None) -> Repository:
    """What the Hub says of a repository.

    Raises:
        UnreachableError: no way to the Hub.
        UserError: no such repository or revision, or no access.
    """
    from huggingface_hub import HfApi

    wanted = Reference(repo, None, revision)
    if offline():
        raise UnreachableError("HF_HUB_OFFLINE forbids to ask the Hub")
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
    """The folder of a repository's safetensors, configuration and tokenizer.

    Args:
        text: `hf://owner/repo[@revision]`, or without `hf://`.

    Raises:
        UserError: as `download`.
    """
    wanted = Reference.parse(text if text.startswith(SCHEME) else SCHEME + text)
    if wanted.file is not None:
        raise UserError(f"{text}: a repository is needed, hf://owner/repo, not a file of it")
    if offline():
        from huggingface_hub import snapshot_download

        options = {"revision": wanted.revision, "local_files_only": True}
        return Path(_explained(wanted, lambda: snapshot_download(wanted.repo, **options)))
    paths = [_file(wanted, file.name) for file in look_up(wanted.repo, wanted.revision).checkpoint()]
    if not paths:
        raise UserError(f"{wanted}: holds no checkpoint: no safetensors, no pytorch_model.bin and no config.json")
    return paths[0].parent


def cached(name: str, *, repo: str | None = None) -> Iterator[Path]:
    """Files of that name, or pattern, in the Hub's cache, of one repository or of all."""
    folder = "*" if repo is None else repo.replace("/", "--")
    yield from (path for path in sorted(_cache().glob(f"models--{folder}/snapshots/*/{name}")) if path.is_file())


def at_hand(repo: str, file: RepoFile) -> int:
    """Bytes of a large file that are in the cache, of it whole or of its beginning."""
    blob = _blob(repo, file.sha256 or "")
    for path in (blob, blob.with_name(blob.name + _PARTIAL)):
        if file.sha256 and path.is_file():
            return path.stat().st_size
    return 0


def _cache() -> Path:
    """The Hub's cache, found without its library where that is not loaded: importing it takes a while."""
    loaded = sys.modules.get("huggingface_hub.constants")
    if loaded is not None:
        return Path(loaded.HF_HUB_CACHE)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _blob(repo: str, sha256: str) -> Path:
    """Where the library keeps the content of a file."""
    return _cache() / f"models--{repo.replace('/', '--')}" / "blobs" / sha256


def facts(wanted: Reference, name: str) -> tuple[int, str]:
    """Bytes of a file of the repository, and the tag of its content.

    Raises:
        UserError: as `download`.
    """
    from huggingface_hub import get_hf_file_metadata

    found = _explained(wanted, lambda: get_hf_file_metadata(_url(wanted, name), endpoint=endpoint()))
    if not found.size:
        raise UserError(f"{wanted}: the Hub does not say how large {name} is")
    return int(found.size), str(found.etag)


def part_of(wanted: Reference, name: str, start: int, end: int) -> bytes:
    """The bytes of a file of the repository from `start` to before `end`.

    Raises:
        UserError: as `download`.
    """
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    def get() -> bytes:
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        answer = get_session().get(_url(wanted, name), headers=headers)
        hf_raise_for_status(answer)
        if answer.status_code != 206 or len(answer.content) != end - start:
            raise OSError(f"a part of {name} was asked for, and something else came")
        return bytes(answer.content)

    return _explained(wanted, get)


def _url(wanted: Reference, name: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(wanted.repo, name, revision=wanted.revision, endpoint=endpoint())


def parts(name: str) -> list[str]:
    """The name, or of a split model those of all its files."""
    folder, _, last = name.rpartition("/")
    return [f"{folder}/{shard}" if folder else shard for shard in shard_names(last)] or [name]


def _file(wanted: Reference, name: str) -> Path:
    """A file of the repository, by way of the cache."""
    from huggingface_hub import hf_hub_download

    options = {"revision": wanted.revision, "local_files_only": offline(), "endpoint": endpoint()}
    if not offline():
        _explained(wanted, lambda: _fetch_large(wanted, name))
    return Path(_explained(wanted, lambda: hf_hub_download(wanted.repo, name, **options)))


def _fetch_large(wanted: Reference, name: str) -> None:
    """Puts a large file that is not in the cache where the library finds it.

    The library itself begins anew after every stop, and does not compare the content with its sha256.

    Raises:
        UserError: the content is not what the Hub says.
    """
    from huggingface_hub import constants, get_hf_file_metadata, try_to_load_from_cache
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    if isinstance(try_to_load_from_cache(wanted.repo, name, revision=wanted.revision), str):
        return
    url = _url(wanted, name)
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
        if _sha256(partial) != sha256:
            partial.unlink()
            raise UserError(
                f"{wanted}: {name} came with another sha256 than the Hub names ({sha256[:12]}..): it was removed; run "
                "the command again"
            )
        partial.rename(blob)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def offline() -> bool:
    """Whether the network is switched off (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def endpoint() -> str | None:
    """The mirror to use in place of huggingface.co (HF_ENDPOINT), or None."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def has_token() -> bool:
    """Whether there is a token: HF_TOKEN, or that of `hf auth login`."""
    from huggingface_hub import get_token

    return get_token() is not None


def _explained(wanted: Reference, get: Callable[[], _T]) -> _T:
    """`get()`, its errors as one line that says what to do."""
    from huggingface_hub import errors

    network = (OSError, ValueError, *errors.HfHubHTTPError.__bases__)  # the last: of whatever HTTP library it uses
    try:
        return get()
    except errors.GatedRepoError:
        where = f"{endpoint() or 'https://huggingface.co'}/{wanted.repo}"
        raise UserError(f"{wanted}: asks for consent: accept its terms at {where}, then `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        advice = "check the name; a private one needs `hf auth login` or HF_TOKEN"
        raise UserError(f"{wanted}: no repository {wanted.repo}, or no access to it: {advice}") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{wanted}: the repository has no revision {wanted.revision}") from None
    except errors.LocalEntryNotFoundError as error:
        if offline():
            raise UnreachableError(
                f"{wanted}: is not in the cache, and HF_HUB_OFFLINE forbids to download it"
            ) from None
        raise UnreachableError(f"{wanted}: cannot be reached: {_first_line(error.__cause__ or error)}") from None
    except errors.EntryNotFoundError:
        raise UserError(f"{wanted}: no such file; {_choices(wanted)}") from None
    except network as error:
        if not isinstance(error, OSError | ValueError) and "connect" in type(error).__name__.lower():
            raise UnreachableError(f"{wanted}: cannot be reached: {_first_line(error)}") from None
        raise UserError(f"{wanted}: the download failed: {_first_line(error)}; run the command again") from None


def _choices(wanted: Reference) -> str:
    """The GGUF files of the repository, or how to name one where they cannot be listed."""
    from huggingface_hub import HfApi, errors

    try:
        if offline():
            return f"the form is {FORM}"
        asked = HfApi(endpoint=endpoint())  # a listing of its tree would be tried six times, each with a warning
        found = asked.model_info(wanted.repo, revision=wanted.revision, timeout=_ASK_SECONDS)
        names = [file.rfilename for file in found.siblings or ()]
    except (OSError, ValueError, *errors.HfHubHTTPError.__bases__):
        return f"the form is {FORM}"
    files = sorted(name for name in names if name.lower().endswith(".gguf"))
    if not files:
        return (
            f"{wanted.repo} has no GGUF file; `specsparse convert hf {wanted.repo} OUT.gguf` makes one of safetensors"
        )
    more = f" and {len(files) - 6} more" if len(files) > 6 else ""
    return f"{wanted.repo} has {', '.join(files[:6])}{more}"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
