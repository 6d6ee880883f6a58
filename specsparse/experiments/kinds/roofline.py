"""`kind: roofline`: what a model file could do at best on a device, and what it was measured to do on this one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specsparse import api
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.experiments import decoding, drafting
from specsparse.experiments.config import RunConfig
from specsparse.experiments.kind import check_name
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs import devices, tables, traffic
from specsparse.measure.costs import predicted as report
from specsparse.measure.costs.measured import measure
from specsparse.models import catalogue
from specsparse.report import display
from specsparse.report.record import RECORD_FILE
from specsparse.runtime import manifest
from specsparse.runtime.times import store
from specsparse.support import json_files, terminal


@dataclass(frozen=True)
class RooflineRecord:
    """What was found: `report` as `measure.costs.predicted.build` makes it."""

    name: str
    report: dict[str, Any]
    manifest: dict[str, Any]

    @property
    def as_promised(self) -> bool:
        """A prediction promises nothing."""
        return True

    @property
    def objective(self) -> float:
        """Predicted tokens per second."""
        return self.report["devices"][0]["tokens_per_second"]

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"name": self.name, "summary": self.report, "manifest": self.manifest, "config": self.manifest["config"]}


def check(cfg: RunConfig) -> None:
    """What can be found wrong without measuring.

    Raises:
        UserError: no such model, an unknown device, drafter or tree.
    """
    catalogue.resolve(cfg.model.path)
    if cfg.roofline.device not in (devices.THIS, *devices.DEVICES):
        devices.get(cfg.roofline.device)
    drafting.methods(cfg)
    check_name(cfg)


def run(cfg: RunConfig, directory: Path, *, engine: Any = None, console: Console | None = None) -> RooflineRecord:
    """Predicts for a device; on this one measures too, once per file. Writes record.json and shows the tables.

    Only `roofline.device=this` loads the weights.

    Raises:
        UserError: a mistake in the config or the model file.
    """
    check(cfg)
    out, table = console or terminal.console(), None
    path = Path(catalogue.resolve(cfg.model.path))
    f = open_gguf(path)
    overrides = {k: v for k, v in cfg.model.overrides().items() if k not in ("kv_dtype", "threads", "backend")}
    config = ModelConfig.from_gguf(f, overrides=overrides)
    methods: list[dict[str, Any]] = []
    if cfg.roofline.device == devices.THIS:
        model = _load(cfg, engine or api, out)
        table = _measured(cfg, model, out)
        device = report.this_machine(table)
        if cfg.roofline.drafters or cfg.roofline.trees:
            prompts, bar = decoding.calibration(cfg, model), decoding.bar(out)
            methods = list(drafting.rows(cfg, model, prompts, bar=bar))
            table = store.load(model) or table
    else:
        device = devices.get(cfg.roofline.device)
    load = traffic.from_gguf(f, config, kv_dtype=cfg.model.kv_dtype or "f16")
    found = report.build(load, config, device, table=table, kv_length=cfg.roofline.kv_length)
    found["drafting"] = methods
    taken = None if table is None else Conditions(table.bandwidth, plain_tokens_per_second=1 / table.plain_s)
    found["conditions"] = taken and taken.to_dict()
    record = RooflineRecord(cfg.name, found, manifest.build(cfg.composed, path))
    json_files.write_atomically(directory / RECORD_FILE, json_files.to_json(record.to_dict(), indent=1) + "\n")
    for part in tables.tables(found):
        out.print(part)
    for line in display.condition_lines(taken):
        out.print(line)
    out.print(Text(f"record: {directory / RECORD_FILE}", style="dim"))
    return record


def _load(cfg: RunConfig, engine: Any, out: Console) -> Any:
    with terminal.loading(out, f"loading {cfg.model.path}") as progress:
        return engine.load(cfg.model.path, progress=progress, **cfg.model.overrides())


def _measured(cfg: RunConfig, model: Any, out: Console) -> Any:
    table = None if cfg.roofline.refresh else store.load(model)
    if table is not None:
        out.print(Text(f"measured {table.identity.get('date')}, kept in {store.path_of(model)}", style="dim"))
        return table
    with terminal.busy(out, "measuring forwards, rounds and this machine"):
        table = measure(model)
    out.print(Text(f"kept in {store.save(model, table)}; roofline.refresh=true measures again", style="dim"))
    return table
