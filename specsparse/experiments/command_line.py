"""The command line of a run: short forms, the parts of a method with their options, and mistakes in one line each.

A config names a part as `GROUP.name`, with its options beside. The file of a choice in `conf/` has the name and what
differs from the defaults, which are those of the choice's class.
"""

import difflib
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specsparse.errors import UserError, pip_install
from specsparse.experiments.trackers import TRACKERS
from specsparse.models import catalogue
from specsparse.speculative.base import GAMMA_NAMES
from specsparse.speculative.drafters import DRAFTERS
from specsparse.speculative.policies import POLICIES
from specsparse.speculative.trees import CHAIN, TREES
from specsparse.speculative.verifiers import RULES
from specsparse.support.files import conf_dir
from specsparse.support.neighbours import WORDS, answer, config_key
from specsparse.support.options import Option, nearest, shown, values_of
from specsparse.support.registry import Registry, entry_points

PARTS: Mapping[str, Registry[Any]] = {
    "drafter": DRAFTERS, "policy": POLICIES, "tree": TREES, "verifier": RULES, "tracker": TRACKERS
}  # fmt: skip
"""Registries by group."""
NOTHING = {"drafter": "none", "tree": CHAIN}
"""Choices that are no part and have no options."""
ELSEWHERE = {"max_nodes": "policy.gamma", "policy": "policy=NAME", "tree": "tree=NAME"}
"""Options of drafters that have a group of their own in the config."""
_OPEN_GROUPS = (*PARTS, "predictor")  # groups that take a user's own part
_SAID = {
    r"Ambiguous value for argument '([^']+)'": "{}: several values are a sweep, add -m; a list is written KEY=[a,b]",
    r"Could not append to config\. An item is already at '([^']+)'": "{} is there already: write it without the +",
    r"Missing mandatory value: ([\w.]+)": "{}: a value is needed",
}
"""Hydra's sentence, and ours."""

_MOST_LISTED = 24  # keys of one group that a line may list
_NEAR = 0.7  # least likeness of two keys of which one may be a slip for the other
_AS_NEAR = 0.15  # a key less like than the best by more than this is not named beside it
_FLAGS = ("-m", "--multirun", "-h", "--help", "-r", "--run", "--resolve")


def shorthand(argv: list[str]) -> list[str]:
    """Spells out `model=FILE.gguf`, `data=FILE.jsonl`, `experiment=NAME` without its plus sign, the lists of `compare`
    (`drafter=a,b`) and other projects' names of choices. The tasks of an experiment's file are those of the built-in
    prompts: `data=` of another source goes without them."""
    sweeps = bool({"-m", "--multirun"} & set(argv))
    compares = not sweeps and bool({"experiment=compare", "experiment=context"} & {arg.lstrip("+") for arg in argv})
    keys = [arg.partition("=")[0] for arg in argv]
    own_tasks = any(key.lstrip("+") == "experiment" for key in keys) and "data.tasks" not in keys
    out = []
    for arg in argv:
        key, eq, value = arg.partition("=")
        key = config_key(key)
        if key == "drafter.model" != arg.partition("=")[0] and "drafter" not in keys:  # assistant_model=FILE says both
            out.append("drafter=model")
        value = ",".join(PARTS[key].canonical(name) for name in value.split(",")) if key in PARTS else value
        if eq and key in ("model", "data") and re.search(r"\.(gguf|jsonl|txt)$|^[~.]|/", value):
            path = os.path.expanduser(value)
            quoted = path if re.fullmatch(r"[\w./:~@-]+", path) else "'" + path.replace("'", "\\'") + "'"
            out += ["model=custom", f"model.path={quoted}"] if key == "model" else [f"data.source={quoted}"]
        elif eq and key == "experiment":
            out.append(f"+{arg}")
        elif compares and key in ("drafter", "verifier") and "," in value:
            out.append(f"compare.{key}s=[{value}]")
        elif eq and re.fullmatch(r"[\d.]+|true|false|null", value, re.IGNORECASE) and (conf_dir() / key).is_dir():
            out.append(f"{key}='{value}'")  # Hydra has a traceback for a choice that is not a text
        elif key == "model.distributed" and re.match(r"[^'\"]*,", value):
            out.append(f"{key}='{value}'")  # one place, no sweep
        else:
            out.append(f"{key}{eq}{value}")
        if eq and key == "data" and value != "builtin" and own_tasks:
            out.append("data.tasks=null")
    return out


def refuse(argv: list[str]) -> None:
    """Refuses words that mean something else to Hydra than to a reader. UserError: what to write instead."""
    for arg in argv:
        if arg.lstrip("+").startswith("prompt="):
            raise UserError(
                "a run decodes the prompts of data.source=FILE (.txt or .jsonl); for one prompt there is "
                'python -m specsparse generate MODEL "PROMPT"'
            )
        key, _, value = arg.partition("=")
        if re.search(r"\d{1000}", value):  # Python reads no number of more than a few thousand digits
            raise UserError(f"{key}={shown(value)} has too many digits")
    verifier = next((arg for arg in argv if re.match(r"verifier(\.name)?=(?!null$)", arg)), None)
    if verifier and {"drafter=none", "drafter.name=none"} & set(argv):
        raise UserError(f"{verifier} needs a drafter: leave it out, or choose another drafter than none")


def flags_first(argv: list[str]) -> list[str]:
    """Flags without a value before the settings: argparse takes settings on one side of them alone. Hydra's own page
    of help knows no settings."""
    if "--hydra-help" in argv:
        return ["--hydra-help"]
    return [arg for arg in argv if arg in _FLAGS] + [arg for arg in argv if arg not in _FLAGS]


def offer(argv: Sequence[str] = ()) -> None:
    """Makes known to Hydra what the files of `conf/` do not say.

    The names of the catalogue are choices of the `model` group. A group of `PARTS` takes any option: its class is
    asked when the config is read, so that none is imported to compose it. A part that the command line names and no
    file has, `drafter=module:Class` or the name of another package's, is a choice too.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store, open_node = ConfigStore.instance(), partial(OmegaConf.create, flags={"struct": False})
    for entry in catalogue.entries().values():
        for name in (entry.name, *entry.aliases):
            store.store(group="model", name=name, node={"defaults": ["custom", "_self_"], "path": entry.name})
    store.store(name="parts", node={group: open_node({}) for group in PARTS})
    for group, _, names in (arg.partition("=") for arg in argv):
        for name in names.split(",") if group in _OPEN_GROUPS else ():
            if is_outside(group, name):
                store.store(group=group, name=name, node=open_node({"name": name}))
    # Hydra copies its sources for every group that --help lists, and this one store with them; it is only read here.
    store.__deepcopy__ = lambda memo: store  # pyrefly: ignore[missing-attribute]  # of this object alone


def is_outside(group: str, name: str) -> bool:
    """Whether the choice is somebody's own part: a `module:Class`, or an installed package's entry point."""
    if (conf_dir() / group / f"{name}.yaml").is_file():
        return False
    return bool(re.fullmatch(r"[\w.]+:[\w.]+", name)) or name in entry_points(group)


def completed(group: str, given: Mapping[str, object]) -> dict[str, object]:
    """A group of the config with all options of a built-in choice, as plain values; any other as it is."""
    name, own = given.get("name"), {key: value for key, value in given.items() if key != "name"}
    if name == NOTHING.get(group) and own:
        raise UserError(f"{group}.{next(iter(own))} is no option of {group}={name}")
    if not isinstance(name, str) or not PARTS[group].is_builtin(name):
        same = GAMMA_NAMES if group == "policy" else ()
        return {"gamma" if key in same else key: value for key, value in given.items()}
    options = PARTS[group].options(name)
    names = {alias: key for key, option in options.items() for alias in option.aliases} | {key: key for key in options}
    spelled = {names.get(key, key): key for key in own}  # of two names of an option the one that came later counts
    for option, key in spelled.items():
        if option in ELSEWHERE and own[key] is not None:
            raise UserError(f"write {ELSEWHERE[option]} instead of {group}.{key}")
    values = values_of(PARTS[group].make(name, {key: own[key] for key in spelled.values()}))
    return {"name": name} | {key: value for key, value in values.items() if key not in ELSEWHERE}


def described(group: str, name: str) -> list[Option]:
    """The options of a choice, with defaults as YAML has them, but for those that have a group of their own."""
    if name == NOTHING.get(group):
        return []
    defaults = values_of(PARTS[group].make(name, {}))
    options = PARTS[group].options(name).values()
    return [o._replace(default=defaults[o.name]) for o in options if o.name not in ELSEWHERE]


def help_text(group: str, name: str) -> str:
    """The options of a choice, one below the other; "" if it has none."""
    rows = [(f"{group}.{o.name}={'null' if o.default is None else o.default}", o.about) for o in described(group, name)]
    width = max((len(left) for left, _ in rows), default=0) + 2
    return "\n".join(
        textwrap.fill(about, 110, initial_indent=left.ljust(width), subsequent_indent=" " * width)
        for left, about in rows
    )


def explain(error: Exception, conf: Path) -> UserError:
    """The `UserError` that says in one line what `error` (of Hydra or OmegaConf) means; `conf` is the config folder."""
    text = str(error)
    if error.__cause__ is not None and "\n" not in text:
        text = f"{text}: {error.__cause__}"
    groups = {d.name: sorted(f.stem for f in d.glob("*.yaml")) for d in sorted(conf.iterdir()) if d.is_dir()}
    override = getattr(error, "override", None)
    if override is not None:
        written = override.lstrip("+")  # which `shorthand` may have put before an option
        return UserError(f"cannot read {written!r}: write KEY=VALUE, and quote a value with special characters")
    for pattern, message in _SAID.items():
        if match := re.search(pattern, text):
            said = (group.lstrip("+") for group in match.groups())
            return UserError(message.format(*said))
    if match := re.search(r"'hydra/(launcher|sweeper)/([a-z]+)\w*'", text):
        return UserError(f"{match[2]} is not installed: {pip_install(f'hydra-{match[2]}-{match[1]}')}")
    if match := re.search(r"Could not find '(\w+)/([^']*)'", text):
        group, choice = match.groups()
        names = [*groups.get(group, []), *(catalogue.names() if group == "model" else ())]
        return UserError(f"{group}={choice}: there is no such {group}{nearest(choice, names)}")
    if match := re.search(r"Could not override '([^'@]+)", text):
        return UserError(f"no key {match[1]}{_near_key(match[1], groups, conf)}")
    if match := re.search(r"You must specify '([^']+)'", text):
        return UserError(f"{match[1]}: choose one, such as {match[1]}={next(iter(groups.get(match[1], ['NAME'])))}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return UserError("; ".join(lines[:2]) or type(error).__name__)


def _near_key(key: str, groups: dict[str, list[str]], conf: Path) -> str:
    """The key to write instead of `key`: the nearest ones; else those of its group; else where all of them are
    listed."""
    from specsparse.experiments.settings import valid_keys  # numpy, which the page of usage needs not

    if key == "experiment" or (key in WORDS and WORDS[key].line):
        return f"; {answer(key) or 'write +experiment=NAME'}"
    head, dot, _ = key.partition(".")
    more, group = set[str](), ""
    for line in f"{_text(conf / 'experiment')}\n{_text(conf / 'placement')}".splitlines():  # such as roofline.device
        if found := re.match(r"(  )?(\w+):", line):
            group = group if found[1] else found[2]
            more.add(f"{group}.{found[2]}" if found[1] else group)
    more = {key for key in more if key.partition(".")[0] not in ("defaults", "hydra")}
    for part in [head] if dot else PARTS:  # options that only a drafter or a tracker has
        own = re.findall(r"^(\w+):", _text(conf / part), re.MULTILINE)
        more |= {f"{part}.{name}" for name in own if name != "defaults"}
    keys = list(dict.fromkeys([*valid_keys(), *groups, *sorted(more)]))
    if key in keys:
        return f" in this config; to add it write +{key}=VALUE"
    if near := _near_keys(key, keys):
        return f"; did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?"
    same = sorted(other for other in keys if other.startswith(f"{head}."))
    if dot and 0 < len(same) <= _MOST_LISTED:
        return f"; valid: {', '.join(same)}"
    named = sorted({*groups, *(other.partition(".")[0] for other in keys if "." in other)})
    return f" and none like it; groups: {', '.join(named)}; all keys of a config: +experiment=NAME --help"


def _text(folder: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.yaml")))


def _near_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Dotted keys like `key`, the nearest first and of equals the first given; at most three.

    Likeness is that of the whole keys, of their last parts, or of the last part and a word of the other one's (`limit`
    and `data.limit_per_task`): about 1 if they are the same or nearly. If `key` has a group, keys of a group of such a
    name go first, else keys without one.
    """

    ratio = lambda a, b: difflib.SequenceMatcher(None, a, b).ratio()  # noqa: E731
    (head, _, name), near = key.rpartition("."), dict[str, float]()
    for other in keys:
        group, _, option = other.rpartition(".")
        like = max(ratio(name, part) for part in (option, *option.split("_")))
        like = like if head else max(like, ratio(key, other))
        if like >= _NEAR:
            near[other] = like + (ratio(head, group) if head else 0.0 if group else _AS_NEAR)
    best = max(near.values(), default=0.0)
    return sorted((k for k in near if near[k] >= best - _AS_NEAR), key=lambda other: -near[other])[:3]
