"""`python -m specsparse.run`: the Hydra entry point.

A mistake in the input is one line on stderr and exit code 2; `debug=true` shows the traceback instead.
"""

import contextlib
import dataclasses
import functools
import importlib
import os
import re
import socket
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specsparse.engine import hosts
from specsparse.errors import UserError, fail, not_installed
from specsparse.experiments.command_line import flags_first, help_text, offer, refuse, shorthand
from specsparse.support.cgroup import cpus
from specsparse.support.files import conf_dir, package_line
from specsparse.support.terminal import FULL, until_the_reader_leaves

_checked: list[Any] = []  # the `CheckedRun` of this process, from the callback to the task
_refusals: dict[object, UserError] = {}  # why models could not be had: the first answer holds for a whole sweep
_sweeps: list[Any] = []  # the `Sweep` of this process while it runs


class CheckBeforeStart:
    """A Hydra callback: the config is validated before the run's directory is made, a sweep ends with its table."""

    def on_run_start(self, config: Any, **_: Any) -> None:
        """Exits with one line if the config is wrong (Hydra swallows exceptions of callbacks, not an exit)."""
        try:
            _checked.append(_check(config, config.hydra.overrides.task))
            if (cfg := _checked[-1].cfg).stood_in is not None:
                _rename(config, cfg.composed, config.hydra.run)
            if swept := config.hydra.sweeper.get("params"):
                values = " ".join(f"{key}={values}" for key, values in swept.items())
                print(f"specsparse: one run of a sweep; -m runs all of it: {values}", file=sys.stderr)
        except UserError as error:
            if config.get("debug") is not True and hosts.leads():  # else the run itself raises it again
                raise SystemExit(fail(str(error))) from None
        if not hosts.leads():  # process 0 alone leaves files behind
            from omegaconf import read_write

            with read_write(config):
                config.hydra.run.dir = hosts.scratch()

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """Exits with one line if the cluster that is to run the sweep does not answer; names the sweep's folder as a
        stand-in's, if its models cannot be had."""
        from omegaconf import read_write

        from specsparse.experiments import sweeps

        try:
            if config.model.get("distributed") is not None:
                raise UserError("model.distributed joins processes for one run: leave -m out, and start run after run")
            sweeps.check_ray(config.hydra.launcher.get("ray"))
        except UserError as error:
            raise SystemExit(fail(str(error))) from None
        place = config.hydra.sweep.dir
        if config.get("stand_in"):
            with contextlib.suppress(UserError):  # each combination says its own mistake
                cfg = _check(config, config.hydra.overrides.task).cfg
                if cfg.stood_in is not None:
                    _rename(config, {"name": cfg.name}, config.hydra.sweep)
        if "ray" in config.hydra.launcher:
            with read_write(config):  # a task begins in the folder of `ray start`
                config.hydra.sweep.dir = str(Path(config.hydra.sweep.dir).absolute())
        if (folder := config.hydra.sweep.dir) != place:
            folder = folder.replace("'", "\\'")
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{folder}'")  # of every combination
        with _lines_of_files():
            _sweeps.append(sweeps.Sweep.begin(config))

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        """Shows one table over all runs of a sweep. Exit code 2 if cells have no record, 1 if a promise was broken."""
        with _lines_of_files():
            if _sweeps and (code := _sweeps.pop().end()):
                raise SystemExit(code)

    def __getattr__(self, name: str) -> Any:
        """Hydra calls every hook of a callback; the others do nothing."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)


@contextlib.contextmanager
def _lines_of_files() -> Generator[None]:
    """Exits with one line where a file cannot be used: Hydra makes a warning of what a callback raises."""
    try:
        yield
    except OSError as error:
        raise SystemExit(fail(f"{error.filename}: {error.strerror}")) from None


def _check(config: Any, words: Sequence[str]) -> Any:
    """A composed config as `runner.check` finds it."""
    from specsparse.experiments.settings import from_omegaconf

    run = from_omegaconf(config)  # without jax: what it finds wrong is said at once
    from specsparse.experiments import runner

    return runner.check(dataclasses.replace(run, words=tuple(words)), refusals=_refusals)


def _rename(config: Any, values: dict[str, Any], place: Any) -> None:
    """Gives Hydra the stand-in's values, its name among them, and `place` a folder that says so."""
    from omegaconf import open_dict, read_write

    from specsparse.experiments.settings import STAND_IN

    with read_write(config), open_dict(config):
        for key, value in values.items():
            config[key] = value
        place.dir = f"{place.dir}{STAND_IN}"


def _task(cfg: Any) -> Any:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    directory, is_cell = Path(hydra.runtime.output_dir), hydra.mode is RunMode.MULTIRUN
    try:
        if is_cell and "ray" in hydra.launcher:
            try:
                os.chdir(hydra.runtime.cwd)  # from the folder of `ray start`
            except OSError as error:
                raise UserError(f"{hydra.runtime.cwd}: not on {socket.gethostname()}: {error.strerror}") from None
        checked = _checked.pop() if _checked else _check(cfg, hydra.overrides.task)
        if checked.cfg.stood_in is not None:
            print(checked.cfg.stood_in, flush=True)
        if is_cell:
            return _cell(checked, directory)
        if not _run(checked, directory).as_promised:
            raise SystemExit(1)
        return None
    except UserError as error:
        if cfg.get("debug") is True or not hosts.leads():
            raise
        if is_cell:  # the other combinations go on
            from specsparse.experiments import sweeps

            choices = (override.lstrip("+") for override in hydra.overrides.task)
            line = f"left out {','.join(choices)}: {error}"
            (directory / sweeps.REFUSED_FILE).write_text(line, encoding="utf-8")
            fail(line)
            return None
        raise SystemExit(fail(str(error))) from None


def _cell(checked: Any, directory: Path) -> float | None:
    """Runs one cell of a sweep, or takes its result over if it has finished before."""
    from specsparse.experiments import settings, sweeps

    cell, reuse = sweeps.Cell.from_config(checked.cfg), checked.cfg.reuse
    if checked.cfg.stood_in is not None:  # beside the folder that Hydra made, which stays that of the pair
        directory = directory.with_name(directory.name + settings.STAND_IN)
        directory.mkdir(exist_ok=True)
    done = cell.finished(directory.parent) if reuse else None
    if done is not None:
        print(f"finished before, taken from {done} (reuse=false runs it again)")
        return sweeps.reuse(done, directory)
    sweeps.forget(directory)  # or the record of an earlier sweep would stand for a worker that dies
    found = _run(checked, directory)
    if not found.as_promised:  # the sweep's end says so: an exit from here would be the death of a launcher's worker
        return None
    cell.mark(directory, found.objective)
    return found.objective


def _run(checked: Any, directory: Path) -> Any:
    """The RunResult, taken alone on this machine if time is measured."""
    from specsparse.experiments import runner
    from specsparse.measure.machine import timing_lock

    _say_place()
    alone = timing_lock(lambda line: print(line, flush=True)) if checked.kind.timed else contextlib.nullcontext()
    with runner.stoppable(checked.cfg, directory), alone:
        return runner.run(checked.cfg, directory, checked=checked)


@functools.cache
def _say_place() -> None:
    print(f"specsparse: {package_line()}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run Hydra on `argv` (default: the command line); returns the exit code."""
    argv, code = sys.argv[1:] if argv is None else list(argv), 0
    try:
        with until_the_reader_leaves():
            code = _main(argv)
    except ModuleNotFoundError as error:
        code = fail(not_installed(error))
    except UserError as error:
        if _debugs(argv):
            raise
        code = fail(str(error))
    return code


def _debugs(argv: list[str]) -> bool:
    return any(re.fullmatch(r"\+*debug=[Tt]rue", arg) for arg in argv)


def _main(argv: list[str]) -> int:
    debug, argv = _debugs(argv), flags_first(shorthand(argv))
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("options_of", help_text, replace=True)  # in the template of --help
    OmegaConf.register_new_resolver("cpus", cpus, replace=True)  # in conf/sweep
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing, and the lines below say it better
    _checked.clear()
    _refusals.clear()
    _sweeps.clear()
    conf = conf_dir()
    saved, sys.argv = sys.argv, ["specsparse.run", *argv]
    try:
        refuse(argv)
        parser = get_args_parser()
        parser.error = _raise_user_error
        parser.allow_abbrev = False  # --experiment would be --experimental-rerun
        flags = parser.parse_args(argv)
        modes = ("run", "multirun", "cfg", "info", "shell_completion")
        chosen = [f"--{mode.replace('_', '-')}" for mode in modes if getattr(flags, mode)]
        if len(chosen) > 1 or (flags.resolve and not (flags.cfg or flags.help)):
            several = f"{' and '.join(chosen)}: give one of them"
            raise UserError(several if len(chosen) > 1 else "--resolve goes with --cfg job or --help")
        offer(argv)
        try:
            with hosts.joined():
                hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(_task)()
        except Exception as error:
            if debug or not _sweeps or not _sweeps[0].lost_worker(error):
                raise
            return _sweeps.pop().end(error)
    except (HydraException, OmegaConfBaseException) as error:
        if debug:
            raise
        from specsparse.experiments.command_line import explain

        return fail(str(explain(error, conf)))
    except OSError as error:
        if debug or isinstance(error, BrokenPipeError) or not (error.filename or error.errno in FULL):
            raise
        what = f"{error.filename}: cannot be used" if error.filename else "the run's folder or output cannot be written"
        place = "a run writes into hydra.run.dir=FOLDER, a sweep into hydra.sweep.dir=FOLDER"
        return fail(f"{what}: {error.strerror}; {place}")
    except ValueError as error:
        if debug or "No trials are completed" not in str(error):  # of Optuna, when all were refused
            raise
        return fail("every trial was refused, see above: leave those choices out or raise hydra.sweeper.n_trials")
    except KeyboardInterrupt as error:
        print(f"specsparse: {str(error) or 'stopped'}", file=sys.stderr)
        return 130
    finally:
        sys.argv = saved
    return 0


def _raise_user_error(message: str) -> NoReturn:
    word = message.removeprefix("unrecognized arguments: ").split()[0]
    if word.startswith("--"):
        name = word.lstrip("-").partition("=")[0]
        setting = "+experiment=NAME" if name == "experiment" else f"{name}=VALUE"
        raise UserError(f"{message}; settings have no dashes, such as {setting}")
    apart = "; settings stand side by side, all flags before them" if "=" in word else ""
    raise UserError(f"{message}{apart}; --help shows a page of usage")


if __name__ == "__main__":
    # Under its importable name: Hydra's callback and this module must be one and the same.
    sys.exit(importlib.import_module("specsparse.run").main())
