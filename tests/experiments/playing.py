"""A run of an experiment in a test: its config in few words, its texts, and what it found, printed and wrote."""

import dataclasses
import functools
import io
import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from rich.console import Console

from specsparse import api
from specsparse.experiments import runner
from specsparse.experiments.kind import KINDS, RunContext, RunResult
from specsparse.experiments.settings import DataSpec, ModelSpec, RunConfig, of_kind
from specsparse.report import plots
from specsparse.support.registry import Choice

GREEDY = {"temperature": 0.0, "ignore_eos": True}
"""A `sampling` group: greedy, to the last token that is asked for."""
_COMMON = {field.name for field in dataclasses.fields(RunConfig)}


class Played(NamedTuple):
    """What a run handed back, what it printed, and its record.json."""

    found: RunResult
    text: str
    record: dict[str, Any]


class OneModel:
    """An engine that hands out the one model there is, whatever is asked for."""

    generate, stream = staticmethod(api.generate), staticmethod(api.stream)

    def __init__(self, model):
        self.model = model

    def load(self, spec, **overrides):
        return self.model


class KeptModels:
    """The library as an engine that loads a file once: its programs are traced for the first run alone."""

    generate, stream = staticmethod(api.generate), staticmethod(api.stream)

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def _loaded(spec, written, **overrides):
        return api.load(spec, **overrides)

    def load(self, spec, *, progress=None, **overrides):
        return self._loaded(spec, Path(spec).exists() and Path(spec).stat().st_mtime_ns, **overrides)


def run_config(
    model, *, drafter="none", options=None, gamma=1, verifier="greedy", text=None, chat=True, **changes
) -> RunConfig:
    """A config in few words: model and text by their files, the method by its names; `changes` are whole groups."""
    fields: dict[str, Any] = {
        "model": model if isinstance(model, ModelSpec) else ModelSpec(str(model)),
        "drafter": Choice(drafter, options or {}),
        "verifier": Choice(verifier),
        "policy": Choice("fixed", {"gamma": gamma}),
        "sampling": {},
        "data": DataSpec(chat=chat) if text is None else DataSpec(source=str(text), chat=chat),
        "tracker": Choice("jsonl"),
        "name": "test",
    }
    return replaced(RunConfig(**fields), **changes)


def replaced(cfg: RunConfig, **groups) -> RunConfig:
    """The config with other groups; those of its kind alone, such as `sparsity`, too."""
    common = {name: group for name, group in groups.items() if name in _COMMON}
    own = {name: group for name, group in groups.items() if name not in _COMMON}
    return dataclasses.replace(cfg, **{"own": {**cfg.own, **own}, **common})


def random_texts(path: Path, count: int, length: int, **fields) -> Path:
    """A file of `count` texts of `length` letters drawn from eight and a space."""
    rng = np.random.default_rng(0)
    rows = [{"text": "".join(rng.choice(list("abcdefgh "), length)), **fields} for _ in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


_png, _pngs = plots.Figure.png, dict[str, bytes]()


def _png_once(figure: plots.Figure) -> bytes:
    """Every figure is drawn; matplotlib's rendering, a third of a run of a tiny model, is done once for a name."""
    if figure.name in _pngs:
        figure.canvas()
    else:
        _pngs[figure.name] = _png(figure)
    return _pngs[figure.name]


def play(cfg: RunConfig, directory: Path, *, model=None, engine=None, width=200) -> Played:
    """Runs a config; `model` is handed out instead of loading one."""
    out = io.StringIO()
    engine = (engine or KeptModels()) if model is None else OneModel(model)
    with mock.patch.object(plots.Figure, "png", _png_once):
        found = runner.run(cfg, directory, engine=engine, console=Console(file=out, width=width))
    return Played(found, out.getvalue(), json.loads((directory / "record.json").read_text()))


def stop_at(monkeypatch, module, name: str, *calls: int) -> list[tuple[Any, ...]]:
    """Presses Ctrl-C after these calls of a module's function, the first of which is 1; the list is of all calls."""
    seen: list[tuple[Any, ...]] = []

    def stop(*args):
        real(*args)
        seen.append(args)
        if len(seen) in calls:
            raise KeyboardInterrupt

    real = getattr(module, name)
    monkeypatch.setattr(module, name, stop)
    return seen


def changed(cfg: RunConfig, group: str, **changes) -> RunConfig:
    """The config with other values in one of its groups."""
    old = cfg.own[group] if group in cfg.own else getattr(cfg, group)
    return replaced(cfg, **{group: dataclasses.replace(old, **changes)})


def settings(cfg: RunConfig) -> Any:
    """What its kind reads."""
    return of_kind(cfg, KINDS.find(cfg.kind).settings)


def quiet_context(directory: Path = Path()) -> RunContext:
    """One that shows nothing, with the library itself as its engine."""
    return RunContext(directory, api, Console(file=io.StringIO()))
