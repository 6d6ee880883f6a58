"""The catalogue: one YAML file a model, those that come with specsparse and the user's own beside them.

An entry says what a model is, where it lies (a package, the Hub, a difference from another model) and how it becomes a
file that loads. What nobody has read at its source, such as a size, is left out; the Hub is asked for it on first use.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import yaml

from specsparse.errors import UserError
from specsparse.models.shape import Shape
from specsparse.support.options import Internal, read

Download = Literal["yes", "no", "ask"]
"""Whether models are downloaded; "ask": asked on a terminal, refused elsewhere."""

OWN = "SPECSPARSE_CATALOGUE"
"""Environment variable that names the folder of the user's own entries."""
_SHIPPED = Path(__file__).resolve().parents[1] / "data" / "models"


@dataclass(frozen=True)
class Entry:
    """A model by name; exactly one of `package`, `base` and `repo` says where it is from.

    Attributes:
        name: of the file, without its ending.
        what: the model, in a few words.
        good_for: what one would take it for.
        role: "target" writes the text, "draft" drafts for one, "head" is a drafter made for one target.
        drafts: names of entries that draft for it, the usual one first.
        aliases: other names.
        package: import name of the Python package that carries it; found without importing it.
        install: the one command that brings the package.
        base: name of the entry that `delta` is a difference from.
        repo: "owner/name" on the Hub.
        file: inside the package or the repository; a pattern with * is matched against the repository's list. None,
            with `repo`: the checkpoint as a folder.
        also: further names that the file goes by on a disk.
        delta: file of the difference, see `models.convert.edit`.
        convert: type of the GGUF that is made of the checkpoint; None: the file is one already.
        revision: branch, tag or commit of the repository; None: its main branch.
        size: bytes of the file that loads; None: unknown until downloaded.
        sha256: of the repository's file.
        licence: as the repository calls it.
        source: where revision, size, sha256 and licence were read.
        gated: the repository asks for consent to its terms and for a token.
        shape: what the file would say of the model, for those who plan without it (`python -m specsparse advise`).
    """

    name: Annotated[str, Internal()]
    what: str
    good_for: str
    role: Literal["target", "draft", "head"] = "target"
    drafts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    package: str | None = None
    install: str | None = None
    base: str | None = None
    repo: str | None = None
    file: str | None = None
    also: tuple[str, ...] = ()
    delta: str | None = None
    convert: Literal["f16", "bf16", "q8_0", "q4_0", "q4_1"] | None = None
    revision: str | None = None
    size: int | None = None
    sha256: str | None = None
    licence: str | None = None
    source: str | None = None
    gated: bool = False
    shape: Shape | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """Names that the file has on a disk, the usual one first; a converted one is called as we write it."""
        own = (f"{self.name}-{self.convert}.gguf",) if self.convert else ((self.file,) if self.file else ())
        return (*own, *self.also)

    @property
    def url(self) -> str:
        """Page of the repository."""
        return f"huggingface.co/{self.repo}"


def own_folder() -> Path:
    """The folder of the user's own entries: `SPECSPARSE_CATALOGUE`, or one in the user's configuration."""
    given = os.environ.get(OWN)
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(given or f"{base}/specsparse/models").expanduser()


def entries() -> Mapping[str, Entry]:
    """All entries by name, in the order of their names; the user's own stand for ours of the same name.

    Raises:
        UserError: a file that is no entry.
    """
    return _entries(own_folder())


def find(name: str) -> Entry | None:
    """The entry of a name or an alias, or None. For a name of ours or the user's, no other file is read."""
    if (path := _file(name)) is not None:
        return _entry(path)
    return next((entry for entry in entries().values() if name in entry.aliases), None)


def names() -> list[str]:
    """Every name and alias."""
    return [name for entry in entries().values() for name in (entry.name, *entry.aliases)]


def forget() -> None:
    """The files are read again at the next question: after an entry was written."""
    _entries.cache_clear()
    _entry.cache_clear()


@functools.cache
def _entries(own: Path) -> Mapping[str, Entry]:
    files = {path.stem: path for folder in (_SHIPPED, own) for path in sorted(folder.glob("*.yaml"))}
    return MappingProxyType({name: _entry(files[name]) for name in sorted(files)})


@functools.cache
def _entry(path: Path) -> Entry:
    return read_entry(path)


def _file(name: str) -> Path | None:
    """The file of an entry, the user's own first."""
    paths = (folder / f"{name}.yaml" for folder in (own_folder(), _SHIPPED)) if name == Path(name).name else ()
    return next((path for path in paths if os.path.isfile(path)), None)


def read_entry(path: Path) -> Entry:
    """The entry in a file.

    Raises:
        UserError: it cannot be read, has an unknown key or a bad value, or does not say where the model is from.
    """
    try:
        with path.open(encoding="utf-8") as file:
            given = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise UserError(f"{path}: is no entry of the catalogue: keys and values are needed")
    entry = read(Entry, given, group=str(path), internal={"name": path.stem})
    places = [key for key in ("package", "base", "repo") if getattr(entry, key)]
    wrong = None
    if len(places) != 1:
        wrong = f"one of package, base and repo is needed, not {' and '.join(places) or 'none'}"
    elif entry.package and not (entry.file and entry.install):
        wrong = "package needs file and install"
    elif entry.base and not entry.delta:
        wrong = "base needs delta"
    elif entry.convert and (entry.file or not entry.repo):
        wrong = "convert is for a checkpoint: repo without file"
    if wrong:
        raise UserError(f"{path}: {wrong}")
    return entry
