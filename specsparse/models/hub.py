"""`hf://owner/repo/file.gguf[@revision]` -> a file on this machine, by huggingface_hub.

Its own settings hold: HF_HOME, HF_TOKEN or the token of `hf auth login`, HF_ENDPOINT for a mirror, HF_HUB_OFFLINE=1 for
what is in the cache only. Files are kept in its cache. A connection that breaks is taken up where it was, a few times.
Where there is no network at all, the cache answers at once: its own retries would take half a minute.
"""

import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib import request
from urllib.parse import urlsplit

from specsparse.engine.gguf.reader import shard_names
from specsparse.errors import UserError

SCHEME = "hf://"
FORM = "hf://owner/repo/file.gguf, perhaps with @revision behind it"
CHECKPOINT_FILES = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")
"""What `convert hf` reads of a repository."""
_REFERENCE = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^@]+?))?(?:@(?P<revision>[^@\s]+))?/?")
_PATIENCE_S = 3.0
"""How long the Hub may take to answer a first connection before it counts as out of reach."""
_T = TypeVar("_T")


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
    from huggingface_hub import hf_hub_download

    cut_off = why_offline()

    def get(file: str) -> Path:
        options = {"revision": wanted.revision, "local_files_only": cut_off is not None, "endpoint": endpoint()}
        where = f"{_site()}/{wanted.repo}/resolve/{wanted.revision or 'main'}/{file}"
        todo = f"fetch {where} where there is a network, and give the path of the file in place of {SCHEME}.."
        return Path(_explained(wanted, lambda: hf_hub_download(wanted.repo, file, **options), cut_off, todo))

    folder, _, name = wanted.file.rpartition("/")
    names = [f"{folder}/{shard}" if folder else shard for shard in shard_names(name)] or [wanted.file]
    paths = [get(file) for file in names]
    return paths[0]


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
    from huggingface_hub import snapshot_download

    cut_off = why_offline()
    options = {"revision": wanted.revision, "local_files_only": cut_off is not None, "endpoint": endpoint()}
    patterns = list(CHECKPOINT_FILES)
    todo = f"fetch {', '.join(patterns)} of {_site()}/{wanted.repo} where there is a network, and give their folder"
    get = partial(snapshot_download, wanted.repo, allow_patterns=patterns, **options)
    return Path(_explained(wanted, get, cut_off, todo))


def offline() -> bool:
    """Whether the network is switched off (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def endpoint() -> str | None:
    """The mirror to use in place of huggingface.co (HF_ENDPOINT), or None."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def why_offline() -> str | None:
    """Why nothing can be downloaded; None where the Hub (or the proxy before it) takes a connection."""
    if offline():
        return "HF_HUB_OFFLINE forbids to download it"
    site = urlsplit(_site())
    proxy = None if request.proxy_bypass(site.netloc) else request.getproxies().get(site.scheme)
    door = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else site
    refused = _refusal(door.hostname or "", door.port or (443 if door.scheme == "https" else 80))
    return refused and f"{door.hostname} cannot be reached ({refused})"


def _refusal(host: str, port: int) -> str | None:
    """Why a first connection fails; None where it is taken. In a thread, since a name server has no time limit."""
    found: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_PATIENCE_S).close()
            found.append(None)
        except OSError as error:
            found.append(error.strerror or str(error))

    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(_PATIENCE_S)
    return found[0] if found else f"no answer in {_PATIENCE_S:g} seconds"


def _site() -> str:
    return endpoint() or "https://huggingface.co"


def _explained(wanted: Reference, get: Callable[[], _T], cut_off: str | None, todo: str) -> _T:
    """`get()`, its errors as one line that says what to do: `todo` where `cut_off` says why nothing can be had."""
    from huggingface_hub import errors

    network = (OSError, ValueError, *errors.HfHubHTTPError.__bases__)  # the last: of whatever HTTP library it uses
    try:
        return get()
    except errors.GatedRepoError:
        where = f"{_site()}/{wanted.repo}"
        raise UserError(f"{wanted}: asks for consent: accept its terms at {where}, then `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        advice = "check the name; a private one needs `hf auth login` or HF_TOKEN"
        raise UserError(f"{wanted}: no repository {wanted.repo}, or no access to it: {advice}") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{wanted}: the repository has no revision {wanted.revision}") from None
    except errors.LocalEntryNotFoundError as error:
        if cut_off is not None:
            raise UserError(f"{wanted}: is not in the cache, and {cut_off}: {todo}") from None
        reason = error.__cause__ or error
        raise UserError(f"{wanted}: cannot be reached: {_first_line(reason)}") from None
    except errors.EntryNotFoundError:
        raise UserError(f"{wanted}: no such file; {_choices(wanted)}") from None
    except network as error:
        raise UserError(f"{wanted}: the download failed: {_first_line(error)}; run the command again") from None


def _choices(wanted: Reference) -> str:
    """The GGUF files of the repository, or how to name one where they cannot be listed."""
    from huggingface_hub import HfApi, errors

    try:
        if why_offline() is not None:
            return f"the form is {FORM}"
        names = HfApi(endpoint=endpoint()).list_repo_files(wanted.repo, revision=wanted.revision)
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
