"""Short forms and other projects' names on the command line, spelled out before Hydra reads it."""

import os
import re

from specsparse.errors import UserError
from specsparse.experiments.compose.parts import ELSEWHERE, PARTS, option_name
from specsparse.support.files import conf_dir
from specsparse.support.options import shown
from specsparse.support.registry import Registry

_FLAGS = ("-m", "--multirun", "-h", "--help", "-r", "--run", "--resolve")
OPEN_GROUPS = ("drafter", "verifier", "tree", "policy", "predictor")
"""Groups of the config that take a user's own part."""


def shorthand(argv: list[str]) -> list[str]:
    """Spells out `model=FILE.gguf`, `data=FILE.jsonl`, `experiment=NAME` without its plus sign, the lists of `compare`
    (`drafter=a,b`), other projects' names of choices and options, and a part from elsewhere: `drafter=module:Class`,
    or the name of another package's; with -m a list of such names, too. The tasks of an experiment's file are those of
    the built-in prompts: `data=` of another source goes without them."""
    sweeps = bool({"-m", "--multirun"} & set(argv))
    compares = not sweeps and any(arg.lstrip("+") == "experiment=compare" for arg in argv)
    given = [(group, names.split(",") if sweeps else [names]) for group, _, names in (a.partition("=") for a in argv)]
    outside = {group for group, names in given if any(_is_outside(group, name) for name in names)}
    own_tasks = any(arg.lstrip("+").startswith("experiment=") for arg in argv) and "data.tasks" not in dict(given)
    out = []
    for arg in argv:
        key, eq, value = arg.partition("=")
        is_path = bool(re.search(r"\.(gguf|jsonl|txt)$|^hf://|^[~./]", value))
        value = ",".join(PARTS[key].canonical(name) for name in value.split(",")) if key in PARTS else value
        if eq and key == "model" and is_path:
            out += ["model=custom", f"model.path={_quote(os.path.expanduser(value))}"]
        elif eq and key == "data" and is_path:
            out += [f"data.source={_quote(os.path.expanduser(value))}"]
        elif key in outside:  # the choice of the config goes, and all it brought; there is no schema for the options
            out += [f"~{key}", f"++{key}.name={','.join(map(_quote, value.split(',')))}"]
        elif eq and _is_option(key):  # Hydra knows those in the file of conf/, not all that the class has
            out.append(f"{option_key(key)}={value}")
        elif eq and key.partition(".")[0] in outside:
            out.append(f"++{key}={value}")
        elif eq and key == "experiment":
            out.append(f"+{arg}")
        elif compares and key in ("drafter", "verifier") and "," in value:
            out.append(f"compare.{key}s=[{value}]")
        elif eq and re.fullmatch(r"[\d.]+|true|false|null", value, re.IGNORECASE) and (conf_dir() / key).is_dir():
            out.append(f"{key}='{value}'")  # Hydra has a traceback for a choice that is not a text
        else:
            out.append(f"{key}{eq}{value}")
        if eq and key == "data" and value != "builtin" and own_tasks:
            out.append("data.tasks=null")
    return out


def option_key(key: str) -> str:
    """A key of `hydra.sweeper.params` as Hydra sets it, whether the file of a choice has it or its class alone."""
    group, _, option = key.partition(".")
    if not _is_option(key):
        return key
    name = option_name(group, option)
    return f"++{group}.{option if name in ELSEWHERE else name}"  # what is refused is refused as it was written


def refuse(argv: list[str]) -> None:
    """Words that mean something else than Hydra would make of them.

    Raises:
        UserError: what to write instead.
    """
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


def _is_option(key: str) -> bool:
    """Whether the key is one of a part whose class says what options there are."""
    group, dot, option = key.partition(".")
    return bool(dot) and group in PARTS and option != "name"


def _is_outside(group: str, name: str) -> bool:
    """Whether the choice is somebody's own part: a `module:Class`, or an installed package's entry point."""
    if group not in OPEN_GROUPS or "," in name or (conf_dir() / group / f"{name}.yaml").is_file():
        return False
    return bool(re.fullmatch(r"[\w.]+:[\w.]+", name)) or name in Registry(group, "").names()


def _quote(value: str) -> str:
    return value if re.fullmatch(r"[\w./:~-]+", value) else "'" + value.replace("'", "\\'") + "'"
