import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from specsparse import run
from specsparse.errors import UserError
from specsparse.experiments.trackers import TRACKERS
from specsparse.experiments.trackers import wandb as of_wandb
from specsparse.experiments.trackers.base import Jsonl, Series
from specsparse.experiments.trackers.tracking import Tracking
from specsparse.experiments.trackers.wandb import Wandb
from specsparse.support import files
from specsparse.support.registry import Choice
from specsparse.testing import check_tracker
from tests.experiments.playing import play, run_config

CURVE = Series("training", "step", least=("loss",), most=("acceptance",))

OUTSIDE = '''
from dataclasses import dataclass
from pathlib import Path

from specsparse.experiments.kind import Kind, RunResult
from specsparse.experiments.trackers.base import Series, Tracker

CURVE = Series("training", "step")


@dataclass(frozen=True)
class Board(Tracker):
    """A tracker in one file; it writes what it is told, and fails where it is asked to."""

    fails: str = ""

    def told(self, client, name, *what):
        with client.open("a") as file:
            print(name, *what, file=file)
        if name == self.fails:
            raise ConnectionError("nobody\\nanswers")

    def start(self, run, directory, folder):
        client = directory / "board.txt"
        self.told(client, "start", (directory / "record.json").exists())
        return client

    def log(self, client, series, values):
        self.told(client, "log", *values.values())

    def finish(self, client, directory):
        self.told(client, "finish", (directory / "record.json").exists())
        return f"board: {client.name}"

    def stop(self, client):
        self.told(client, "stop")


class Steps(Kind):
    takes_model = False
    timed = False

    def check(self, cfg):
        pass

    def run(self, cfg, ctx):
        for step in range(2):
            ctx.tracker.point(CURVE, {"step": step, "loss": None if step else 0.5})
        if cfg.seed:
            raise ValueError("a defect")
        return RunResult({"steps": 2})


class TimedSteps(Steps):
    timed = True
'''
LIVE = ["start False", "log 0.0 0.5", "log 1.0", "finish True"]
POINTS = '{"series": "training", "step": 0.0, "loss": 0.5}\n{"series": "training", "step": 1.0}\n'


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """A run of the kind of that name with the outsider's tracker; what the tracker was told, and the text."""
    (tmp_path / "board.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("board", None)

    def run_it(kind="Steps", fails="", **changes):
        cfg = run_config("none.gguf", kind=f"board:{kind}", composed={"name": "test"},
                         tracker=Choice("board:Board", {"fails": fails}), **changes)  # fmt: skip
        _, text, record = play(cfg, tmp_path / "run")
        assert record["summary"] == {"steps": 2}
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == POINTS
        return (tmp_path / "run" / "board.txt").read_text().splitlines(), text.splitlines()

    return run_it


def test_a_tracker_of_ones_own_follows_a_run_while_it_goes_on(followed):
    told, lines = followed()
    assert told == LIVE and lines[-1] == "board: board.txt"


def test_a_kind_that_measures_time_is_followed_when_it_is_over(followed):
    told, _ = followed("TimedSteps")
    assert told == ["start True", *LIVE[1:]]


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_a_tracker_that_fails_is_one_line_and_the_record_is_whole(followed, fails):
    told, lines = followed(fails=fails)
    assert told == [*LIVE[: 2 if fails == "log" else 4], "stop"]
    (line,) = [line for line in lines if "board:Board" in line]
    assert "ConnectionError: nobody answers" in line and any(line.startswith("record: ") for line in lines)


def test_a_tracker_that_cannot_start_ends_a_run_before_its_work(followed, tmp_path):
    with pytest.raises(UserError, match="tracker=board:Board cannot start: ConnectionError: nobody answers"):
        followed(fails="start")
    assert not list((tmp_path / "run").glob("*.json*"))
    told, lines = followed("TimedSteps", fails="start")  # its work is done
    assert told[1:] == ["start True"] and any("cannot start" in line for line in lines)


def test_a_run_that_fails_stops_its_tracker(followed, tmp_path):
    with pytest.raises(ValueError, match="a defect"):
        followed(seed=1)
    assert (tmp_path / "run" / "board.txt").read_text().splitlines() == [*LIVE[:3], "stop"]


def ended(words):
    with pytest.raises(SystemExit) as end:
        run.main(["+experiment=certify", *words])
    assert end.value.code == 2


def test_a_tracker_of_ones_own_on_the_command_line(followed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ended(["tracker=board:Board", "tracker.fail=x"])
    assert "tracker.fail is no option of board:Board; did you mean fails?" in capsys.readouterr().err
    ended(["tracker=board:Steps"])
    assert "board:Steps is no Tracker" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [None, "loose", "line", "changes"])
def test_the_contract_of_a_tracker(followed, broken):
    import board

    class Broken(board.Board):
        def finish(self, client, directory):
            if broken == "changes":
                (directory / "record.json").write_text("{}")
            return "one\ntwo" if broken == "line" else None

    if broken is None:
        check_tracker(board.Board())
        check_tracker(Jsonl())
        return
    if broken == "loose":
        board.Board.__dataclass_params__.frozen = False
    with pytest.raises(AssertionError, match={"loose": "frozen", "line": "not one line", "changes": "record"}[broken]):
        check_tracker(Broken())


def test_rows_then_one_record(tmp_path):
    tracker = Tracking(tmp_path / "run")
    tracker.log({"prompt_id": "a", "rate": np.float32(0.5)})
    tracker.log({"prompt_id": "b", "rate": float("nan"), "ids": (1, 2)})
    assert not (tmp_path / "run" / "record.json").exists()
    tracker.finish({"name": "x", "summary": {"value": np.int64(3)}})
    rows = [json.loads(line) for line in (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()]
    assert rows == [{"prompt_id": "a", "rate": 0.5}, {"prompt_id": "b", "rate": None, "ids": [1, 2]}]
    assert json.loads((tmp_path / "run" / "record.json").read_text()) == {"name": "x", "summary": {"value": 3}}
    assert sorted(os.listdir(tmp_path / "run")) == ["prompts.jsonl", "record.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "record.json"
    files.write_atomically(file, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(UserError, match=r"record\.json: cannot be written: disk full"):
        files.write_atomically(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("csv", {}, "tracker=csv is unknown"),
        ("jsonl", {"mode": "x"}, "tracker.mode"),
        ("wandb", {"mod": "x"}, r"tracker\.mod is no option of wandb; did you mean mode"),
        ("wandb", {"mode": "sometimes"}, "offline, online, disabled"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        TRACKERS.make(name, options)


# wandb without wandb: a module in its place says what it was asked.


class Fake(SimpleNamespace):
    """What of wandb a start and a log need; `down` is what it raises."""

    def __init__(self, down=None, resumed=False):
        super().__init__(__spec__=object(), run=None, down=down, asked=[], logged=[], metrics={}, summary={})
        self.Settings, self.teardown, self.setup = SimpleNamespace, lambda: None, lambda settings: None
        self.resumed, self.offline, self.define_metric = resumed, False, self._metric

    def _metric(self, name, **options):
        self.metrics[name] = options

    def log(self, values):
        self.logged.append(values)

    def login(self, **_):
        if self.down:
            raise self.down

    def init(self, **given):
        self.asked.append(given)
        if self.down and given["mode"] == "online":
            raise self.down
        self.id = given["id"] or "new"
        return self


@pytest.fixture
def fake(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    of_wandb._log_in.cache_clear()

    def put(**options):
        monkeypatch.setitem(sys.modules, "wandb", Fake(**options))
        return sys.modules["wandb"]

    yield put
    of_wandb._log_in.cache_clear()


OPTIONS = {"mode": "online", "project": "a", "entity": "b", "group": "c", "tags": ("d",), "id": "e", "resume": "must"}
VARIABLES = {"MODE": "disabled", "PROJECT": "A", "ENTITY": "B", "RUN_GROUP": "C", "TAGS": "D,DD", "RUN_ID": "E",
             "RESUME": "never"}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "env", "wanted"),
    [
        ({}, {}, ["offline", "specsparse", None, None, ["made"], None, None]),
        ({}, VARIABLES, ["disabled", "A", "B", "C", ["made", "D", "DD"], "E", "never"]),
        (OPTIONS, VARIABLES, ["online", "a", "b", "c", ["made", "d"], "e", "must"]),
    ],
)
def test_an_option_then_the_environment_then_the_default(fake, monkeypatch, tmp_path, options, env, wanted):
    module = fake()
    for name, value in env.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    tracker = TRACKERS.make("wandb", options)
    tracker.check()
    tracker.start(run_config("m", kind="made"), tmp_path, None)
    (asked,) = module.asked
    assert [asked[key] for key in OPTIONS] == wanted


def test_a_curve_has_its_axis_and_its_best(fake, tmp_path):
    module = fake()
    client = Wandb().start(run_config("m"), tmp_path, None)
    for step in (25, 50):
        Wandb().log(client, CURVE, {"step": step, "loss_1": 1 / step, "acceptance": 2.0, "rate": math.nan})
    assert [point["training/step"] for point in module.logged] == [25, 50] and module.logged[0]["training/loss_1"]
    axes = {name: (how.get("step_metric"), how.get("summary")) for name, how in module.metrics.items()}
    assert axes["training/loss_1"] == ("training/step", "min,last")
    assert axes["training/acceptance"] == ("training/step", "max,last")
    assert axes["training/rate"] == ("training/step", None) and axes["training/step"][0] is None


def test_a_training_that_goes_on_goes_on_in_its_run_of_wandb(fake, tmp_path):
    fake()
    Wandb(id="mine").start(run_config("m"), tmp_path, tmp_path)
    module = fake(resumed=True)
    module.summary["training/step"] = 25
    client = Wandb().start(run_config("m"), tmp_path, tmp_path)
    assert (module.asked[0]["id"], module.asked[0]["resume"]) == ("mine", "allow")
    for step in (25, 50):  # the first is there
        Wandb().log(client, CURVE, {"step": step})
    assert module.logged == [{"training/step": 50}]


def test_online_without_a_login_is_one_line_before_the_work(fake, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    fake(down=RuntimeError("No API key configured.\nmore"))
    ended(["tracker=wandb", "tracker.mode=online"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "tracker=wandb cannot be online: No API key configured. more; give tracker.mode=offline" in line
    assert not os.listdir(tmp_path)
    for name, value in {"WANDB_MODE": "sometimes", "WANDB_RESUME": "perhaps", "WANDB_FINISH_TIMEOUT": "soon"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            ended(["tracker=wandb"])
        assert f"{name}={value} must be" in capsys.readouterr().err
    monkeypatch.setattr(of_wandb.importlib.util, "find_spec", lambda name: None)
    ended(["tracker=wandb", "tracker.mode=offline"])
    assert "wandb is not installed" in capsys.readouterr().err


def test_a_network_that_is_gone_when_the_work_is_done_leaves_the_run_for_later(fake, tmp_path):
    module = fake(down=RuntimeError("no such host"))
    with pytest.raises(RuntimeError, match="no such host"):
        Wandb(mode="online").start(run_config("m"), tmp_path, None)
    (tmp_path / "record.json").write_text("{}")
    Wandb(mode="online").start(run_config("m"), tmp_path, None)
    assert [asked["mode"] for asked in module.asked] == ["online", "online", "offline"]
