"""`kind: roofline`: what a model file could do at best on a device, and what it was measured to do on this one."""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from specsparse.data import devices
from specsparse.engine.model import Model
from specsparse.experiments import configured, decoding
from specsparse.experiments.kind import Kind, RunContext, RunResult, header_of
from specsparse.experiments.settings import DecodingSettings
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs.forecast import device_of
from specsparse.measure.costs.measuring import measure
from specsparse.measure.costs.roofline import Traffic, get_device
from specsparse.measure.costs.roofline_report import roofline_report, tables
from specsparse.models import catalogue
from specsparse.report import display
from specsparse.runtime import timing_cache
from specsparse.runtime.timing_cache import CostTable
from specsparse.support import terminal
from specsparse.support.options import Size


@dataclass(frozen=True)
class RooflineSpec:
    """A device by name and tokens in the cache to predict for; `refresh` measures this device again.

    On this machine drafting is measured too: chains of `drafters`, and `trees`.
    """

    device: str = "this"
    kv_length: Size | None = None
    refresh: bool = False
    drafters: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RooflineSettings(DecodingSettings):
    roofline: RooflineSpec = RooflineSpec()


class RooflineKind(Kind[RooflineSettings]):
    """What a model file could do at best on a device, and what it was measured to do on this one."""

    takes_ffn = False

    def check(self, cfg: RooflineSettings) -> None:
        catalogue.resolve(cfg.model.path)
        devices.known(cfg.roofline.device)
        configured.drafting_settings(cfg, cfg.roofline.drafters, cfg.roofline.trees)

    def run(self, cfg: RooflineSettings, ctx: RunContext) -> RunResult:
        """`roofline.device=this` alone loads the weights, and measures once per file."""
        out, table = ctx.console, None
        f, config = header_of(cfg.model)
        methods: list[dict[str, object]] = []
        if cfg.roofline.device == devices.THIS:
            model = ctx.load(cfg.model)
            table = _measured(cfg, model, out)
            device = device_of(table)
            if cfg.roofline.drafters or cfg.roofline.trees:
                prompts, bar = decoding.calibration(cfg, model), decoding.bar_on(out)
                chosen = configured.drafting_settings(cfg, cfg.roofline.drafters, cfg.roofline.trees)
                methods = list(configured.drafting_rows(chosen, model, prompts, bar=bar))
                table = timing_cache.load(model) or table
        else:
            device = get_device(cfg.roofline.device)
        load = Traffic.from_gguf(f, config, kv_dtype=cfg.model.kv_dtype or "f16")
        found = roofline_report(load, config, device, table=table, kv_length=cfg.roofline.kv_length)
        found["drafting"] = methods
        taken = None if table is None else Conditions(table.bandwidth, plain_tokens_per_second=1 / table.plain_s)
        found["conditions"] = taken and taken.to_dict()
        shown = [*tables(found), *display.condition_lines(taken)]
        return RunResult(found, shown=shown, objective=found["devices"][0]["tokens_per_second"])


def _measured(cfg: RooflineSettings, model: Model, out: Console) -> CostTable:
    table = None if cfg.roofline.refresh else timing_cache.load(model)
    if table is not None:
        out.print(Text(f"measured {table.identity.get('date')}, kept in {timing_cache.path_of(model)}", style="dim"))
        return table
    with terminal.busy(out, "measuring forwards, rounds and this machine"):
        table = measure(model)
    out.print(Text(f"kept in {timing_cache.save(model, table)}; roofline.refresh=true measures again", style="dim"))
    return table
