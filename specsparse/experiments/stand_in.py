"""Stand-ins: an experiment whose models cannot be had runs on an embedded pair, and everything that it writes says so.

An experiment declares one as `stand_in: NAME`. The catalogue has it (`Entry.stand_ins`): a model of this machine, with
the groups of the config that come with it, drafter and policy or ffn and predictor. All else stays the experiment's.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace

from specsparse.errors import UserError, refuse
from specsparse.experiments.command_line import PARTS, completed
from specsparse.experiments.settings import STAND_IN, RunConfig, from_omegaconf
from specsparse.models import catalogue
from specsparse.report.record import StandIn
from specsparse.speculative.drafters import draw_temperature
from specsparse.support.files import Json
from specsparse.support.neighbours import DRAFT_FILES

NAMING = {"model", "model.path", "drafter", "drafter.name", *(f"drafter.{key}" for key in DRAFT_FILES.values())}
"""Words of the command line that name a model or a drafter: then no other is taken."""


def replaced(cfg: RunConfig, why: UserError) -> RunConfig:
    """The run with its models replaced, named as the stand-in's.

    Raises `why` if the run has no stand-in, or the command line names a model or a drafter. UserError: the stand-in
    does not go with the experiment, or with a part that the command line names.
    """
    given = {word.lstrip("+").partition("=")[0] for word in cfg.words}
    if cfg.stand_in is None or given & NAMING:
        raise why
    known, drafts = catalogue.stand_ins(), cfg.drafter.name != "none"
    entry, composed = known[cfg.stand_in], cfg.composed
    own: Mapping[str, Json] = entry.stand_ins[cfg.stand_in]
    brings = {group: _held(group, part, composed.get(group) or {}, given) for group, part in own.items()}
    fitting = [name for name, one in known.items() if ("drafter" in one.stand_ins[name]) == drafts]
    ffn = brings.get("ffn", {}).get("name")
    refuse({
        f"stand_in={cfg.stand_in} is for other experiments: give stand_in={' or '.join(fitting)}, or false":
            cfg.stand_in not in fitting,
        f"ffn=powerinfer needs PowerInfer's file, and {entry.name} is none: leave it out, or give stand_in=false":
            ffn == "powerinfer" != own["ffn"]["name"],
    })  # fmt: skip
    if "ffn" in own and ffn != own["ffn"]["name"]:  # the predictor came with the FFN
        brings.pop("predictor", None)
    drafter = brings.get("drafter", {})
    if drafter.get("temperature", 0.0) is None:
        drafter["temperature"] = draw_temperature(cfg.verifier.name, cfg.params.temperature) or 0.0
    used: Json = {"model": {**composed["model"], "path": entry.name}}
    used |= {group: completed(group, part) if group in PARTS else part for group, part in brings.items()}
    run = from_omegaconf({**composed, **used, "name": f"{cfg.name}{STAND_IN}"})
    groups = [group for group in used if composed.get(group) != run.composed[group]]
    asked, instead = ({group: _said(group, whole.get(group)) for group in groups} for whole in (composed, run.composed))
    return replace(run, stood_in=StandIn(asked, instead, getattr(why, "reason", "") or str(why)))


def _held(group: str, own: Json, asked: Json, given: set[str]) -> Json:
    """The stand-in's part of a group. A part or an option on the command line takes precedence."""
    if given & {group, f"{group}.name"}:
        return asked
    options = PARTS[group].options(own["name"]) if group in PARTS else asked
    return own | {key: asked[key] for key in options if f"{group}.{key}" in given}


def _said(group: str, part: Json | None) -> object:
    """A model's path; of another part its name and the options that differ from their defaults."""
    if part is None or group == "model":
        return {"name": "none"} if part is None else part["path"]
    name, default, needed = part["name"], dict[str, object](), {"name", "gamma"} & part.keys()
    if group in PARTS and PARTS[group].is_builtin(name):
        options = PARTS[group].options(name).values()
        needed |= {option.name for option in options if option.default is dataclasses.MISSING}
        default = completed(group, {key: part[key] for key in needed})
    return {key: value for key, value in part.items() if key in needed or (value or 0) != (default.get(key) or 0)}
