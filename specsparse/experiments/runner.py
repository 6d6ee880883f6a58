"""A run: its config is checked, its kind is looked up, and the module of that kind does it."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from specsparse.errors import UserError
from specsparse.experiments.config import FfnSpec, RunConfig
from specsparse.experiments.decoding import Engine, default_engine
from specsparse.experiments.kind import WITH_MESH, WITHOUT_FFN, Outcome, module_of
from specsparse.support import terminal


def check(cfg: RunConfig) -> None:
    """What can be found wrong before anything is loaded or written.

    Raises:
        UserError: an unknown kind, or whatever that kind finds wrong.
    """
    if "placement" in cfg.composed and cfg.kind != "placement":
        raise UserError(
            f"placement=... does nothing with kind={cfg.kind}: solve it with +experiment=placement, then give "
            "+model.placement=FILE.gpuidx"
        )
    module_of(cfg.kind).check(cfg)
    if cfg.ffn != FfnSpec() and cfg.kind in WITHOUT_FFN:
        raise UserError(f"kind={cfg.kind} takes no ffn: leave it out")
    if cfg.model.mesh is not None and cfg.kind not in WITH_MESH:
        raise UserError(f"kind={cfg.kind} needs the whole model on one device: leave model.mesh out")
    if cfg.model.mesh is not None and cfg.ffn != FfnSpec():
        raise UserError("model.mesh is for dense models: leave ffn out")


def run(cfg: RunConfig, directory: Path, *, engine: Engine | None = None, console: Console | None = None) -> Outcome:
    """Run `cfg`, write its record into `directory`, and show the result.

    Args:
        cfg: the run.
        directory: made if it is not there.
        engine: `specsparse.api` by default.
        console: the terminal by default.

    Raises:
        UserError: a mistake in the config, the model file or the prompts.
    """
    check(cfg)
    job = module_of(cfg.kind)
    out = console or terminal.console()
    found = job.run(cfg, directory, engine=engine or default_engine(), console=out)
    if cfg.tracker.name == "wandb":
        from specsparse.experiments import wandb_run  # its client takes seconds

        out.print(Text(wandb_run.publish(directory, cfg.tracker.options)), soft_wrap=True)  # a command is not cut
    return found
