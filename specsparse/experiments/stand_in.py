"""Stand-ins: an experiment whose models cannot be had runs on an embedded pair, and everything that it writes says so.

An experiment declares one as `stand_in: NAME`. The catalogue has it (`Entry.stand_ins`): a model of this machine, with
the groups of the config that come with it, drafter and policy or ffn and predictor. All else stays the experiment's.
"""

import dataclasses
from dataclasses import replace

from specsparse.errors import UserError, refuse
from specsparse.experiments.command_line import PARTS, completed
from specsparse.experiments.settings import STAND_IN, RunConfig, from_omegaconf
from specsparse.models import catalogue
from specsparse.report.record import StandIn
from specsparse.speculative.drafters import draw_temperature
from specsparse.support.files import Json

NAMING = ("model", "model.path", "drafter", "drafter.name", "drafter.model", "drafter.path", "drafter.head")
"""Words of the command line that name a model or a drafter: then no other is taken."""


def replaced(cfg: RunConfig, why: UserError) -> RunConfig:
    """The run with its models replaced, named as the stand-in's.

    Raises `why` if the run has no stand-in, or the command line names a model or a drafter.
    """
    given = {word.lstrip("+").partition("=")[0] for word in cfg.words}
    if cfg.stand_in is None or given & set(NAMING):
        raise why
    entry = catalogue.stand_ins()[cfg.stand_in]
    brings = {group: dict(part) for group, part in entry.stand_ins[cfg.stand_in].items()}
    fitting = "predictors" if cfg.drafter.name == "none" else "lookup_head or model"
    wrong = ("drafter" in brings) == (cfg.drafter.name == "none")
    refuse({f"stand_in={cfg.stand_in} is for other experiments: give stand_in={fitting}, or false": wrong})
    drafter, composed = brings.get("drafter", {}), cfg.composed
    if drafter.get("temperature", 0.0) is None:
        drafter["temperature"] = draw_temperature(cfg.verifier.name, cfg.params.temperature) or 0.0
    if "policy" in brings:
        brings["policy"] = _policy(brings["policy"], composed["policy"], given)
    used: Json = {"model": {**composed["model"], "path": entry.name}}
    used |= {group: completed(group, part) if group in PARTS else part for group, part in brings.items()}
    run = from_omegaconf({**composed, **used, "name": f"{cfg.name}{STAND_IN}"})
    groups = [group for group in used if composed.get(group) != run.composed[group]]
    asked, instead = ({group: _said(group, whole.get(group)) for group in groups} for whole in (composed, run.composed))
    return replace(run, stood_in=StandIn(asked, instead, getattr(why, "reason", "") or str(why)))


def _policy(own: Json, asked: Json, given: set[str]) -> Json:
    """The stand-in's policy with what the command line sets: another one, or an option that it has too."""
    if given & {"policy", "policy.name"}:
        return asked
    named = {key: asked[key] for key in PARTS["policy"].options(own["name"]) if f"policy.{key}" in given}
    return {**own, **named}


def _said(group: str, part: Json | None) -> object:
    """A part by its name and the options that are not their defaults; a model by its name, all that differs."""
    if part is None or group == "model":
        return {"name": "none"} if part is None else part["path"]
    name, default, needed = part["name"], dict[str, object](), {"name", "gamma"} & part.keys()
    if group in PARTS and PARTS[group].is_builtin(name):
        options = PARTS[group].options(name).values()
        needed |= {option.name for option in options if option.default is dataclasses.MISSING}
        default = completed(group, {key: part[key] for key in needed})
    return {key: value for key, value in part.items() if key in needed or (value or 0) != (default.get(key) or 0)}
