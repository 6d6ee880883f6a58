"""Short forms and other projects' names of choices on the command line, spelled out before Hydra reads it."""

import os
import re

from specsparse.errors import UserError
from specsparse.experiments.compose.parts import PARTS
from specsparse.support.files import conf_dir
from specsparse.support.options import shown

_OLD_KEYS = {"certify.museum": "certify.known_bugs"}
_FLAGS = ("-m", "--multirun", "-h", "--help", "-r", "--run", "--resolve")


def shorthand(argv: list[str]) -> list[str]:
    """Spells out `model=FILE.gguf`, `data=FILE.jsonl`, `experiment=NAME` without its plus sign, the lists of `compare`
    (`drafter=a,b`) and other projects' names of choices. The tasks of an experiment's file are those of the built-in
    prompts: `data=` of another source goes without them."""
    sweeps = bool({"-m", "--multirun"} & set(argv))
    compares = not sweeps and any(arg.lstrip("+") == "experiment=compare" for arg in argv)
    keys = [arg.partition("=")[0] for arg in argv]
    own_tasks = any(key.lstrip("+") == "experiment" for key in keys) and "data.tasks" not in keys
    out = []
    for arg in argv:
        key, eq, value = arg.partition("=")
        key = _OLD_KEYS.get(key, key)
        is_path = bool(re.search(r"\.(gguf|jsonl|txt)$|^hf://|^[~./]", value))
        value = ",".join(PARTS[key].canonical(name) for name in value.split(",")) if key in PARTS else value
        if eq and key == "model" and is_path:
            out += ["model=custom", f"model.path={_quote(os.path.expanduser(value))}"]
        elif eq and key == "data" and is_path:
            out += [f"data.source={_quote(os.path.expanduser(value))}"]
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


def _quote(value: str) -> str:
    return value if re.fullmatch(r"[\w./:~-]+", value) else "'" + value.replace("'", "\\'") + "'"
