"""The catalogue of models, and the way from a name, a path or a reference to the Hub to a file on this machine.

The catalogue is one YAML file per model: those that come with specsparse, and the user's own beside them. An entry says
what a model is, where it is from (a package, the Hub, a difference from another model) and how it becomes a file that
loads. A fact that nobody has read at its source, such as a size, is left out; the Hub is asked for it on first use.

resolve("smollm2-135m")               # the file, or `NotHere`
path_of("llama-2-7b", "ask")          # says what it would download; asks on a terminal, refuses elsewhere
"""

import contextlib
import difflib
import functools
import hashlib
import importlib.util
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from specsparse.engine.gguf.shards import shard_names
from specsparse.errors import CHECKOUT, UserError, pip_install
from specsparse.models import hub
from specsparse.models.hub import RepoFile
from specsparse.support.files import Json, cache_dir, kept, need_disk, need_memory, size_text, to_json, write_atomically
from specsparse.support.hub_names import SCHEME, is_reference
from specsparse.support.options import Count, Internal, Read, Size, read, shown

Download = Literal["yes", "no", "ask"]
"""Whether models are downloaded; "ask": asked on a terminal, refused elsewhere."""
Mixed = Literal["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M", "MXFP4"]
"""llama.cpp's names for the types of all of a file's weights."""
OWN = "SPECSPARSE_CATALOGUE"
"""Environment variable that names the folder of the user's own entries."""
DRAFTER = "prompt_lookup"
"""The drafter of the commands for models that have no better one."""
COMPANION = "specsparse_models"
"""The package of model files; `specsparse-models` in a checkout of this project."""
_SPARE = 0.05  # of the disk that is needed
_KEPT = ("revision", "size", "sha256", "licence")
_SHIPPED = Path(__file__).resolve().parents[1] / "data" / "models"


@dataclass(frozen=True)
class Shape:
    """The shape of a model that need not be here, as its config.json and the name of its GGUF file say it."""

    architecture: str  # a name of `engine.architectures.ARCHITECTURES`
    layers: Count  # L of docs/notation.md
    width: Count  # D
    heads: Count  # H
    ff: Count  # F; with experts, the width of one
    vocab: Count  # V
    context: Count  # positions
    kv_heads: Count | None = None  # G; None: as many as heads
    head_dim: Count | None = None  # d; None: width / heads
    tied: bool = False  # the output matrix is the embedding
    window: Size = 0  # tokens that a layer with a window sees
    experts: Count | None = None  # E
    chosen: Count | None = None  # k
    weights: Mixed = "Q4_K_M"  # types of the file; "MXFP4": of its experts, all else is Q8_0

    def typed(self, shapes: Iterator[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, GGUF type, shape) of tensors given by name and shape (numpy order).

        The rules are those of llama.cpp's quantiser (src/llama-quant.cpp). Vectors, biases and routers are F32. The
        output matrix has six bits beside four; in Q4_K_M so have the values and the down matrices of every third layer
        in the middle and of all at both ends. Rows that are no multiple of 256 cannot be K-quantised.
        """
        eighth = self.layers // 8
        better = {
            f"blk.{i}.{name}.weight"
            for i in range(self.layers)
            if i < eighth or i >= 7 * self.layers // 8 or (i - eighth) % 3 == 2
            for name in ("attn_v", "ffn_down", "ffn_down_exps")
        }
        for name, shape in shapes:
            output = name == "output.weight" or (self.tied and name == "token_embd.weight")
            six_bits = output or (self.weights == "Q4_K_M" and name in better)
            kind = "Q6_K" if six_bits else self.weights.removesuffix("_M")
            if len(shape) < 2 or name.endswith(".bias") or "ffn_gate_inp" in name:
                kind = "F32"
            elif self.weights == "MXFP4":
                kind = "MXFP4" if len(shape) == 3 else "Q8_0"
            elif self.weights in ("F16", "BF16", "Q8_0"):
                kind = self.weights
            elif shape[-1] % 256:
                kind = {"Q6_K": "Q8_0", "Q4_K": "Q5_0"}.get(kind, kind)
            yield name, kind, shape


@dataclass(frozen=True)
class Entry:
    """A model by name; exactly one of `package`, `base` and `repo` says where it is from."""

    name: Annotated[str, Internal()]  # of the file, without its ending
    what: str  # the model, in a few words
    good_for: str  # what one would take it for
    # "target" writes the text, "draft" drafts for one, "head" is a drafter made for one target
    role: Literal["target", "draft", "head"] = "target"
    drafts: tuple[str, ...] = ()  # names of entries that draft for it, the usual one first
    drafter: str = DRAFTER  # of the commands, if none is named
    aliases: tuple[str, ...] = ()  # other names
    package: str | None = None  # import name of the Python package that carries it; found without importing it
    install: str | None = None  # the one command that brings the package
    base: str | None = None  # name of the entry that `delta` is a difference from
    repo: str | None = None  # "owner/name" on the Hub
    # inside the package or the repository; a pattern with * is matched against the repository's list. None, with
    # `repo`: the checkpoint as a folder
    file: str | None = None
    also: tuple[str, ...] = ()  # further names that the file goes by on a disk
    delta: str | None = None  # file of the difference, see `models.convert.edit`
    # type of the GGUF that is made of the checkpoint; None: the file is one already
    convert: Literal["f16", "bf16", "q8_0", "q4_0", "q4_1"] | None = None
    revision: str | None = None  # branch, tag or commit of the repository; None: its main branch
    size: int | None = None  # bytes of the file that loads; None: unknown until downloaded
    sha256: str | None = None  # of the repository's file
    licence: str | None = None  # as the repository calls it
    source: str | None = None  # where revision, size, sha256 and licence were read
    gated: bool = False  # the repository asks for consent to its terms and for a token
    # what the file would say of the model, for those who plan without it (`python -m specsparse advise`)
    shape: Shape | None = None
    # by name, the groups of a run's config that the model brings with it if it stands in for models that cannot be
    # had (`experiments.stand_in`)
    stand_ins: Annotated[Json, Read(dict, "groups of a config by name")] = field(default_factory=dict, hash=False)

    @property
    def files(self) -> tuple[str, ...]:
        """Names that the file has on a disk, the usual one first; a converted one has our own name for it."""
        own = (f"{self.name}-{self.convert}.gguf",) if self.convert else ((self.file,) if self.file else ())
        return (*own, *self.also)

    @property
    def url(self) -> str:
        return f"huggingface.co/{self.repo}"


def own_folder() -> Path:
    """The folder of the user's own entries: `SPECSPARSE_CATALOGUE`, or one in the user's configuration."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get(OWN) or f"{base}/specsparse/models").expanduser()


def entries() -> Mapping[str, Entry]:
    """All entries by name, in the order of their names; the user's own replace ours of the same name."""
    files = {path.stem: path for folder in (_SHIPPED, own_folder()) for path in sorted(folder.glob("*.yaml"))}
    return {name: _entry(files[name]) for name in sorted(files)}


def find(name: str) -> Entry | None:
    """The entry of a name or an alias, or None. For a name of ours or the user's, no other file is read."""
    if name == Path(name).name:
        paths = (folder / f"{name}.yaml" for folder in (own_folder(), _SHIPPED))
        if path := next((path for path in paths if os.path.isfile(path)), None):
            return _entry(path)
    return next((entry for entry in entries().values() if name in entry.aliases), None)


def stand_ins() -> dict[str, Entry]:
    """The entries that stand in for others, by the name of the stand-in."""
    return {name: entry for entry in entries().values() for name in entry.stand_ins}


def names() -> list[str]:
    return [name for entry in entries().values() for name in (entry.name, *entry.aliases)]


@functools.cache
def _entry(path: Path) -> Entry:
    """Reads an entry; UserError if it has a bad value, or does not say where the model is from."""
    import yaml  # a run says in one line which packages are missing, after this module is imported

    try:
        with path.open(encoding="utf-8") as file:
            given, wrong = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), None
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        given, wrong = None, f"cannot be read: {' '.join(str(error).split())}"
    if isinstance(given, dict):
        entry = read(Entry, given, group=str(path), internal={"name": path.stem})
        places = [key for key in ("package", "base", "repo") if getattr(entry, key)]
        if len(places) != 1:
            wrong = f"one of package, base and repo is needed, not {' and '.join(places) or 'none'}"
        elif entry.package and not (entry.file and entry.install):
            wrong = "package needs file and install"
        elif entry.base and not entry.delta:
            wrong = "base needs delta"
        elif entry.convert and (entry.file or not entry.repo):
            wrong = "convert is for a checkpoint: repo without file"
        if wrong is None:
            return entry
    raise UserError(f"{path}: {wrong or 'is no entry of the catalogue: keys and values are needed'}")


class NotHere(UserError):
    """Models of the Hub that are not on this machine: `wanted` by the setting that names each, and the `reason` why
    they are not downloaded; `advice` leads over to what else there is to do."""

    def __init__(self, wanted: Mapping[str, Entry], reason: str = "", advice: str = ""):
        self.wanted, self.reason = dict(wanted), reason
        which, given = [], []
        for key, entry in self.wanted.items():
            usual = entry.files[0] if entry.files and "*" not in entry.files[0] else entry.name
            facts = [size_text(entry.size)] if entry.size else []
            facts += [entry.url, *([f"converted to {entry.convert.upper()}"] if entry.convert else [])]
            which.append(f"{usual} ({', '.join(facts)})")
            given.append(f"{key}=/path/to/{usual}")
        verb = "is" if len(which) == 1 else "are"
        instead = f"give {' '.join(given)}, or put it into {model_folder()}"
        why = (f"{reason}; " if reason else "") + (f"{advice} " if advice else "")
        super().__init__(f"{' and '.join(which)} {verb} not on this machine: {why}{instead}")


def model_folder() -> Path:
    """The folder that is searched for models first, and where specsparse writes those that it makes."""
    return cache_dir() / "models"


def resolve(spec: str | Path) -> Path:
    """The file of a model.

    Args:
        spec: a name of the catalogue, the path of a GGUF file (of a split model the first one), or
            a name of the Hub, such as owner/repo:Q4_K_M, whose file is downloaded (see `models.hub`).

    Raises:
        NotHere: a model of the Hub that is not on this machine; `obtain` downloads it.
        UserError: an unknown name (with the nearest), a package that is not installed (with the command), or no file.
    """
    text = str(spec)
    if is_reference(text):
        return _on_hub(text, hub.download)
    entry = find(text)
    if entry is not None:
        found = locate(entry, make=True)
        if found is None:
            raise NotHere({"model.path": entry})
        return found
    with contextlib.suppress(OSError, ValueError):  # a name too long, or with a NUL
        if text and (path := Path(os.path.expanduser(spec))).exists():
            return path
    if "/" in text or "\\" in text or text.lower().endswith(".gguf"):
        page = re.match(
            r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)|hf:/+(.+)", text, re.IGNORECASE
        )
        hint = f"; of the Hub it is hf://{page[1] or page[2]}" if page else ""
        raise UserError(f"{text}: no such file{hint}")
    near = difflib.get_close_matches(text.lower(), names(), cutoff=0.5)
    here = ", ".join(entry.name for entry in entries().values() if entry.package)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{here} need no network, `specsparse models` lists all."
    raise UserError(f"unknown model {shown(text)!r}: {hint} The path of a GGUF file is fine too")


def locate(entry: Entry, *, make: bool = False) -> Path | None:
    """The file of an entry, or None for a model of the Hub that is not here; with `make` the file of a difference
    from another model is made. UserError if its package is not installed."""
    if entry.repo:  # in the folders of models, then in the Hub's cache
        given, cache = os.environ.get("SPECSPARSE_MODELS"), Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        folders = [*([Path(given)] if given else []), model_folder(), Path("models"), cache / "specsparse" / "models"]
        for name in entry.files:
            there = [path for folder in folders for path in sorted(folder.expanduser().glob(name))]
            for path in [*there, *hub.cached(name)]:
                if all((path.parent / part).is_file() for part in shard_names(path.name) or [path.name]):
                    return path
        if not entry.convert and not entry.file:
            for path in hub.cached("config.json", repo=entry.repo):
                if any(path.parent.glob("*.safetensors")) or any(path.parent.glob("*.bin")):
                    return path.parent
        return None
    package = entry.package or COMPANION
    path = _in_package(package, (entry.delta if entry.base else entry.file) or "")
    if path is None:
        how = f"{sys.executable} -m {entry.install or 'pip install ./specsparse-models (in a checkout of specsparse)'}"
        if package == COMPANION and CHECKOUT:
            how = pip_install(str(CHECKOUT / "specsparse-models"))
        raise UserError(f"model {entry.name!r} is not installed; run: {how}")
    if entry.base is None:
        return path
    # The file in the cache; one of another version of the difference is left alone, and made anew.
    version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    made = model_folder() / f"{entry.name}-{version}.gguf"
    if make and not made.is_file():
        from specsparse.models.convert.edit import apply_delta

        print(f"making {entry.name} of {entry.base} and {path.name}, once: {made}", file=sys.stderr)
        apply_delta(resolve(entry.base), path, made)
    return made


def companion(name: str, what: str) -> Path | None:
    """The file of a model's `what` ("predictors", "activations") in the companion package, or None."""
    entry = find(name)
    return _in_package(COMPANION, f"{name}.{what}.safetensors") if entry is not None and entry.base else None


def _in_package(package: str, file: str) -> Path | None:
    """A file of a package that is installed, without importing it."""
    found = importlib.util.find_spec(package)
    paths = (Path(folder) / file for folder in (found and found.submodule_search_locations) or ())
    return next((path for path in paths if path.is_file()), None)


class DownloadPlan(NamedTuple):
    entry: Entry
    files: tuple[RepoFile, ...]  # in its repository
    bytes: int  # of the files
    missing: int  # bytes that are not here yet
    loaded: int  # bytes of the file that loads; of one that is to be made, at most
    text: str  # one line for people


def path_of(spec: str | os.PathLike[str], download: Download = "ask") -> Path:
    """The file of a model as `resolve` finds it, downloaded if it is a name of the Hub; raises as both do."""
    if download not in typing.get_args(Download):
        raise UserError(f"download={download!r} must be one of {', '.join(typing.get_args(Download))}")
    try:
        return resolve(os.fspath(spec))
    except NotHere as missing:
        obtain(missing.wanted, download)
    return resolve(os.fspath(spec))


def published(spec: str | os.PathLike[str], download: Download = "ask") -> Path:
    """The folder or file of a drafter: a path, a name of the catalogue, owner/repo or a GGUF file of one."""
    text = os.fspath(spec)
    if is_reference(text) and (wanted := hub.Reference.parse(text)).file is None and wanted.tag is None:
        return _on_hub(text, hub.download_drafter)
    return path_of(text, download)


def _on_hub(text: str, get: Callable[[str], Path]) -> Path:
    """`get(text)`; the error of a name without hf:// says that no such file is here."""
    try:
        return get(text)
    except hub.HubError as error:
        if text.startswith(SCHEME):
            raise
        raise type(error)(text, f"no such file here, and on the Hub: {error.why}") from None


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
        raise NotHere(wanted, "download=no")
    try:
        plans = [plan(entry) for entry in wanted.values()]
    except hub.UnreachableError as error:
        raise NotHere(wanted, error.why.rstrip("."), "without a network") from None
    # Room on the disk, and memory to load what is downloaded.
    needed = math.ceil((1 + _SPARE) * sum(one.missing + (one.loaded if one.entry.convert else 0) for one in plans))
    elsewhere = "make room, or set HF_HOME and SPECSPARSE_CACHE to folders of another disk"
    need_disk(model_folder(), needed, elsewhere)
    loaded = sum(one.loaded for one in plans if one.entry.role != "head")
    weights = f"the weights of {' and '.join(one.entry.name for one in plans)}"
    need_memory(weights, loaded, "take a smaller model or a smaller type of weights")

    total = size_text(sum(one.missing for one in plans))
    if download == "ask" and not (sys.stdin.isatty() and sys.stderr.isatty()):
        each = ", ".join(f"{one.entry.name} {size_text(one.missing)}" for one in plans)
        raise NotHere(wanted, f"download=yes fetches {total} ({each})", "or")
    for one in plans:
        _say(one.text)
    if download == "ask":
        print(f"Download {total}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise NotHere(wanted, "not downloaded")
    for one in plans:
        entry = one.entry
        reference = str(hub.Reference(str(entry.repo), one.files[0].name if entry.file else None, entry.revision))
        found = hub.download(reference) if entry.file else hub.download_checkpoint(reference)
        if entry.convert is None:
            _say(f"{entry.name}: {found}")
            continue
        from rich.console import Console  # a model that is here needs not wait for these

        from specsparse.models.convert.hf import convert_hf
        from specsparse.support import terminal

        path = model_folder() / entry.files[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        with terminal.loading(Console(stderr=True), f"converting {entry.name}") as progress:
            convert_hf(found, path, type_name=entry.convert, progress=progress)
        size = path.stat().st_size
        _keep(entry, size=size)
        _say(f"{entry.name}: converted, {size_text(size)}: {path}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def plan(entry: Entry) -> DownloadPlan:
    """Asks the Hub for an entry and keeps what it says for the next time; raises as `hub.look_up`, and a UserError for
    another checksum than the entry has."""
    from huggingface_hub import get_token

    assert entry.repo is not None
    found = hub.look_up(entry.repo, entry.revision)
    files = found.matching(entry.file) if entry.file else found.checkpoint()
    wrong = None
    if found.gated and get_token() is None:
        then = "accept its terms there, then set HF_TOKEN or run `hf auth login`"
        wrong = f"{entry.url} asks for consent and a token: {then}"
    elif not files:
        names = ", ".join(file.name for file in found.files if file.name.endswith(".gguf")) or "no GGUF file"
        wrong = f"{entry.url} has no {entry.file or 'checkpoint'}; it has {names}"
    elif entry.sha256 and files[0].sha256 and entry.sha256 != files[0].sha256:
        both = f"{files[0].sha256[:12]}.., the catalogue says {entry.sha256[:12]}.."
        wrong = f"{files[0].name} on the Hub has another sha256 ({both}): it is not the file that was meant"
    if wrong:
        raise UserError(f"{entry.name}: {wrong}")
    size, at_hand = sum(file.size or 0 for file in files), sum(hub.at_hand(entry.repo, file) for file in files)
    _keep(entry, revision=found.commit, licence=found.licence, sha256=files[0].sha256 if len(files) == 1 else None,
          size=None if entry.convert else size)  # fmt: skip
    several = f"{len(files)} files, " if len(files) > 1 else ""
    here = f" ({size_text(at_hand)} of it here)" if at_hand else ""
    made = f", converted to {entry.convert.upper()}" if entry.convert else ""
    text = f"{several}{size_text(size)}{here} from {entry.url}{made}, licence {found.licence or 'not given'}"
    loaded = entry.size if entry.convert and entry.size else size
    return DownloadPlan(entry, tuple(files), size, size - at_hand, loaded, f"{entry.name}: {text}")


def known(entry: Entry) -> Entry:
    """The entry, with facts that the Hub gave earlier where the entry has none."""
    facts = kept(_facts_file(entry))
    if facts.get("repo") != entry.repo:
        return entry
    gaps: dict[str, Any] = {key: facts.get(key) for key in _KEPT if getattr(entry, key) is None}
    return replace(entry, **gaps)


def _keep(entry: Entry, **facts: str | int | None) -> None:
    """Keeps facts of an entry, unless another one has its name."""
    if find(entry.name) != entry:
        return
    before = {key: getattr(known(entry), key) for key in _KEPT}
    told = {key: value for key, value in facts.items() if value is not None}
    write_atomically(_facts_file(entry), to_json({"repo": entry.repo, **before, **told}) + "\n")


def _facts_file(entry: Entry) -> Path:
    return model_folder() / f"{entry.name}.hub.json"
