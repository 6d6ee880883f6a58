"""`hf://owner/repo/file.gguf[@revision]` -> a file on this machine, by huggingface_hub.

Its own settings hold: HF_HOME, HF_TOKEN or the token of `hf auth login`, HF_ENDPOINT for a mirror, HF_HUB_OFFLINE=1 for
what is in the cache only. Files are kept in its cache. A connection that breaks is taken up where it was, a few times.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from specsparse.engine.gguf.reader import shard_names
from specsparse.errors import UserError

SCHEME = "hf://"
FORM = "hf://owner/repo/file.gguf, perhaps with @revision behind it"
CHECKPOINT_FILES = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")
"""What `convert hf` reads of a repository."""
_REFERENCE = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^@]+?))?(?:@(?P<revision>[^@\s]+))?/?")
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

    def get(file: str) -> Path:
        options = {"revision": wanted.revision, "local_files_only": offline(), "endpoint": endpoint()}
        return Path(_explained(wanted, lambda: hf_hub_download(wanted.repo, file, **options)))

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

    options = {"revision": wanted.revision, "local_files_only": offline(), "endpoint": endpoint()}
    patterns = list(CHECKPOINT_FILES)
    return Path(_explained(wanted, lambda: snapshot_download(wanted.repo, allow_patterns=patterns, **options)))


def offline() -> bool:
    """Whether the network is switched off (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def endpoint() -> str | None:
    """The mirror to use in place of huggingface.co (HF_ENDPOINT), or None."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


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
            raise UserError(f"{wanted}: is not in the cache, and HF_HUB_OFFLINE forbids to download it") from None
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
        if offline():
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
