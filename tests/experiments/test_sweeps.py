"""Sweeps: what has finished is not run twice, a killed run leaves nothing half, and timings take turns."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from specsparse import run
from specsparse.errors import UserError
from specsparse.experiments import runner, sweeps
from specsparse.experiments.trackers.tracking import Tracking
from specsparse.measure.machine import timing_lock
from specsparse.report import runs
from specsparse.support import files
from specsparse.testing import write_tiny_gguf
from tests.cells import cells as of_matrix
from tests.experiments.playing import run_config

ROOT = Path(__file__).resolve().parents[2]


def config(tmp_path, **changes):
    model = tmp_path / "model.gguf"
    if not model.exists():
        model.write_bytes(b"x" * 100)
    composed = {"model": {"path": str(model)}, "seed": 0, "name": "s", **changes}
    return run_config(model, drafter="prompt_lookup", gamma=3, name="s", composed=composed)


def test_the_key_is_of_what_a_result_depends_on(tmp_path, monkeypatch):
    cfg = config(tmp_path)
    key = sweeps.Cell.from_config(cfg).key
    assert sweeps.Cell.from_config(config(tmp_path, name="other", stream=False, debug=True, reuse=False)).key == key
    assert sweeps.Cell.from_config(config(tmp_path, seed=1)).key != key
    monkeypatch.setattr(sweeps, "source_hash", lambda: "other code")
    assert sweeps.Cell.from_config(cfg).key != key
    monkeypatch.undo()
    (tmp_path / "model.gguf").write_bytes(b"y" * 101)
    assert sweeps.Cell.from_config(cfg).key != key


def test_the_text_of_a_named_file_counts(tmp_path):
    prompts = tmp_path / "mine.txt"
    keys = set()
    for text in ("one", "another"):
        prompts.write_text(text)
        keys.add(sweeps.Cell.from_config(config(tmp_path, data={"source": str(prompts)})).key)
    assert len(keys) == 2


def finished(directory, cell, text="{}"):
    files.write_atomically(directory / "record.json", text)
    (directory / "prompts.jsonl").write_text('{"row": 1}\n')
    cell.mark(directory, 2.5)


def test_a_finished_cell_is_found_in_its_sweep_and_in_one_beside_it(tmp_path):
    cell, sweep = sweeps.Cell("k", "s"), tmp_path / "s" / "2"
    assert cell.finished(sweep / "0") is None
    finished(tmp_path / "s" / "1" / "0", cell)
    assert cell.finished(sweep) == tmp_path / "s" / "1" / "0"
    finished(sweep / "4", cell)
    assert cell.finished(sweep) == sweep / "4"
    assert dataclasses.replace(cell, key="other").finished(sweep) is None
    assert dataclasses.replace(cell, name="t").finished(tmp_path / "s" / "3") is None  # not a folder of its sweeps


def test_without_its_own_record_a_mark_is_none(tmp_path):
    cell = sweeps.Cell("k", "s")
    finished(tmp_path / "0", cell)
    for spoil in ('{"another": 1}', None):
        record = tmp_path / "0" / "record.json"
        record.write_text(spoil) if spoil else record.unlink()
        assert cell.finished(tmp_path) is None


def test_what_is_taken_over_is_whole(tmp_path):
    cell, there, here = sweeps.Cell("k", "s"), tmp_path / "1" / "0", tmp_path / "2" / "3"
    finished(there, cell, '{"name": "s"}')
    here.mkdir(parents=True)
    assert sweeps.reuse(there, here) == 2.5
    assert {f.name: f.read_text() for f in here.iterdir()} == {f.name: f.read_text() for f in there.iterdir()}
    assert cell.finished(tmp_path / "2") == here
    assert sweeps.reuse(here, here) == 2.5


def test_what_is_taken_over_is_the_same_measurement(tmp_path):
    cell, (there, here, anew) = sweeps.Cell("k", "s"), (tmp_path / n / "0" for n in "123")
    finished(there, cell, '{"date": 1}')
    finished(anew, cell, '{"date": 2}')
    here.mkdir(parents=True)
    sweeps.reuse(there, here)
    assert runs.once([there, here, anew]) == {there: (here,), anew: ()}
    (here / "record.json").write_text('{"date": 3}')  # no longer what the mark is of
    assert list(runs.once([there, here, anew])) == [there, here, anew]
    (there / "cell.json").unlink()
    assert runs.measurement(there) is None and runs.measurement(anew).key == "k"


class Done:
    as_promised, objective = True, 1.5


@pytest.fixture
def cells(tmp_path, monkeypatch):
    """The gammas of the cells that were really run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    (tmp_path / "model.gguf").write_bytes(b"x")
    done = []

    def run_it(cfg, directory, **_):
        done.append(cfg.gamma)
        tracker = Tracking(directory)
        tracker.log({"gamma": cfg.gamma})
        tracker.finish({"name": cfg.name, "summary": {}, "config": cfg.composed})
        return Done

    monkeypatch.setattr(runner, "run", run_it)
    return done


SWEEP = ["-m", "model=./model.gguf", "name=s"]


def test_a_sweep_started_again_runs_what_is_missing_only(tmp_path, cells, capsys):
    def start(gammas, *more):
        cells.clear()
        directory = tmp_path / "runs" / "s" / str(len(list((tmp_path / "runs" / "s").glob("*"))))
        assert run.main([*SWEEP, f"policy.gamma={gammas}", f"hydra.sweep.dir={directory}", *more]) == 0
        found = [json.loads(f.read_text())["config"]["policy"]["gamma"] for f in directory.glob("*/record.json")]
        return list(cells), sorted(found)

    assert start("1") == ([1], [1])
    capsys.readouterr()
    assert start("2,1", "stream=false") == ([2], [1, 2])
    assert capsys.readouterr().out.count("finished before, taken from") == 1
    assert start("1", "reuse=false") == ([1], [1])


def test_what_a_config_sweeps_may_be_an_option_that_no_file_names(tmp_path, cells, monkeypatch):
    """`policy.probe_share` is an option of the class alone: the command line took it, `params` did not."""
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    mine.joinpath("probing.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /policy: auto_off\n"
        "hydra:\n  sweeper:\n    params:\n      policy.probe_share: 0.1,0.2\n"
    )
    found = f"--config-dir={mine.parent}"
    assert run.main([found, *SWEEP, "+experiment=probing", "hydra.sweep.dir=runs/s/0"]) == 0
    records = [json.loads(f.read_text()) for f in sorted((tmp_path / "runs" / "s" / "0").glob("*/record.json"))]
    assert [r["config"]["policy"]["probe_share"] for r in records] == [0.1, 0.2]


def test_a_broken_promise_is_not_finished(tmp_path, cells, monkeypatch):
    monkeypatch.setattr(Done, "as_promised", False)
    with pytest.raises(SystemExit):
        run.main([*SWEEP, "policy.gamma=1", "hydra.sweep.dir=runs/s/0"])
    assert not list((tmp_path / "runs").rglob(runs.CELL_FILE))


def test_a_cell_whose_record_is_elsewhere_is_named(tmp_path, cells, monkeypatch, capsys):
    """As on a host that does not share the folder: its task ends well, and nothing of it is here. One is left out."""
    cell = run._cell

    def here_or_elsewhere(checked, directory):
        return shutil.rmtree(directory) if checked.cfg.gamma == 2 else cell(checked, directory)

    monkeypatch.setattr(run, "_cell", here_or_elsewhere)
    with pytest.raises(SystemExit) as ended:
        run.main([*SWEEP, "policy.gamma=1,2,-3", "hydra.sweep.dir=runs/s/0"])
    assert ended.value.code == 2
    refused, line = capsys.readouterr().err.splitlines()
    assert "policy.gamma=-3" in refused and "(policy.gamma=2)" in line and "hydra.sweep.dir" in line


def test_what_slurm_is_asked_for(tmp_path, cells, monkeypatch, capsys):
    """The script of one cell: submitit checks the names of its parameters, Slurm itself is not here."""
    slurm = pytest.importorskip("submitit.slurm.slurm")
    monkeypatch.setattr(slurm.SlurmExecutor, "affinity", classmethod(lambda cls: 1))
    scripts = []

    def submit(executor, *args):
        scripts.append(executor._make_submission_file_text("command", "uid"))
        raise RuntimeError("no cluster")

    monkeypatch.setattr(slurm.SlurmExecutor, "_internal_process_submissions", submit)
    words = ["sweep=slurm", "hydra.launcher.partition=cpu", "hydra.launcher.account=us", "hydra.sweep.dir=runs/s/0"]
    assert run.main([*SWEEP, *words, "policy.gamma=1,2"]) == 2
    lines = scripts[0].splitlines()
    assert {"#SBATCH --partition=cpu", "#SBATCH --account=us", "#SBATCH --exclusive"} <= {*lines}
    assert any(line.startswith(f"#SBATCH --output={tmp_path}/runs/s/0/.submitit/") for line in lines)
    assert "RuntimeError: no cluster" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def stopped(cells, monkeypatch):
    """The cell of gamma 2 gets the signal that was put in here, after a pass or, with `rows` 0, before the first."""
    asked = {"signal": signal.SIGINT, "rows": 1}

    def run_it(cfg, directory, **_):
        cells.append(cfg.gamma)
        if cfg.gamma == 2 and not asked["rows"]:
            os.kill(os.getpid(), asked["signal"])
        tracker = Tracking(directory)
        tracker.log({"gamma": cfg.gamma})
        if cfg.gamma == 2 and asked["signal"]:
            os.kill(os.getpid(), asked["signal"])
        tracker.finish({"name": cfg.name, "summary": {}, "config": cfg.composed})
        return Done

    monkeypatch.setattr(runner, "run", run_it)
    return asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_so_and_is_not_finished(tmp_path, cells, stopped, capsys, number):
    command = [*SWEEP, "policy.gamma=1,2,3", "hydra.sweep.dir=runs/s/0"]
    stopped["signal"], before = number, signal.getsignal(signal.SIGTERM)
    assert run.main(command) == 130 and cells == [1, 2]
    assert signal.getsignal(signal.SIGTERM) is before
    said, cell = capsys.readouterr().err, tmp_path / "runs" / "s" / "0" / "1"
    assert said.count("\n") == 1 and said.startswith("specsparse: stopped; 1 pass kept in ")
    record = json.loads((cell / "record.json").read_text())
    assert record["state"] == "stopped" and record["passes"] == 1 and record["config"]["policy"]["gamma"] == 2
    assert (cell / "prompts.jsonl").read_text() == '{"gamma": 2}\n'
    assert len(sweeps.records(cell.parent)) == 1
    assert [r.directory.name for r in runs.find([cell.parent])] == ["0"]


def test_a_stopped_cell_is_not_taken_over(tmp_path, cells, stopped):
    command, record = [*SWEEP, "policy.gamma=2", "hydra.sweep.dir=runs/s/0"], tmp_path / "runs/s/0/0/record.json"
    assert run.main(command) == 130 and json.loads(record.read_text())["state"] == "stopped"
    stopped["signal"] = None
    assert run.main(command) == 0 and cells == [2, 2]
    assert "state" not in json.loads(record.read_text())


def test_passes_of_an_earlier_run_are_not_the_stopped_ones(tmp_path, cells, stopped, capsys):
    cell = tmp_path / "runs" / "s" / "0" / "0"
    cell.mkdir(parents=True)
    (cell / "prompts.jsonl").write_text('{"from": "an earlier run"}\n')
    stopped["rows"] = 0
    assert run.main([*SWEEP, "policy.gamma=2", "hydra.sweep.dir=runs/s/0"]) == 130
    assert json.loads((cell / "record.json").read_text())["passes"] == 0
    assert "stopped; no pass was done, and " in capsys.readouterr().err


def test_a_record_that_was_written_is_not_a_stopped_one(tmp_path, cells, monkeypatch, capsys):
    def run_it(cfg, directory, **_):
        Tracking(directory).finish({"summary": {"whole": 1}})
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", run_it)
    assert run.main(["model=./model.gguf", "name=s", "hydra.run.dir=runs/s/0"]) == 130
    assert json.loads((tmp_path / "runs/s/0/record.json").read_text()) == {"summary": {"whole": 1}}
    assert "stopped after the record was written" in capsys.readouterr().err


KILLED = """
import sys, time
from specsparse import run
from specsparse.experiments import runner
from specsparse.experiments.trackers.tracking import Tracking
class Done:
    as_promised, objective = True, 1.5
def slow(cfg, directory, **_):
    tracker = Tracking(directory)
    tracker.log({"from": "the killed process"})
    print("gamma", cfg.gamma, flush=True)
    time.sleep(0 if cfg.gamma == 1 else 60)
    tracker.finish({"summary": {}})
    return Done
runner.run = slow
run.main(sys.argv[1:])
"""


def test_a_killed_sweep_leaves_nothing_half_and_goes_on(tmp_path, cells):
    """kill -9 in the second cell of three: the same command then runs the second and the third."""
    command = [*SWEEP, "policy.gamma=1,2,3", "hydra.sweep.dir=runs/s/0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    child = subprocess.Popen([sys.executable, "-c", KILLED, *command], stdout=subprocess.PIPE, text=True,
                             cwd=tmp_path, env=environment)  # fmt: skip
    assert any("gamma 2" in line for line in child.stdout)  # its row is written
    child.send_signal(signal.SIGKILL)
    child.communicate()
    sweep = tmp_path / "runs" / "s" / "0"
    assert [f.parent.name for f in sweep.rglob("record.json")] == ["0"]
    assert (sweep / "1" / "prompts.jsonl").is_file()
    assert run.main(command) == 0
    assert cells == [2, 3]
    assert (sweep / "1" / "prompts.jsonl").read_text() == '{"gamma": 2}\n'  # none of the killed run's rows
    assert [f.parent.name for f in sorted(sweep.rglob("record.json"))] == ["0", "1", "2"]


HAMMER = """
import sys
from pathlib import Path
from specsparse.support.files import write_atomically
for i in range(10**9):
    write_atomically(Path(sys.argv[1]), str(i % 10) * 4_000_000)
    if i == 0:
        print("begun", flush=True)
"""


def test_a_record_is_whole_whenever_its_writer_is_killed(tmp_path):
    for kill in range(4):
        file = tmp_path / f"{kill}.json"
        child = subprocess.Popen([sys.executable, "-c", HAMMER, str(file)], stdout=subprocess.PIPE, cwd=ROOT)
        child.stdout.readline()
        time.sleep(0.013 * kill)
        child.kill()
        child.communicate()
        text = file.read_text()
        assert len(text) == 4_000_000 and len(set(text)) == 1


@pytest.fixture
def lock(tmp_path, monkeypatch):
    file = tmp_path / "timing.lock"
    monkeypatch.setenv("SPECSPARSE_TIMING_LOCK", str(file))
    return file


def is_held(file):
    with file.open() as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_timings_take_turns(lock):
    order, lines, waits = [], [], threading.Event()

    def second():
        def announce(line):
            lines.append(line)
            waits.set()

        with timing_lock(announce):
            order.append("second")

    with timing_lock(lines.append):
        assert is_held(lock) and not lines
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"] and not is_held(lock)
    assert len(lines) == 1 and f"process {os.getpid()}" in lines[0]


HOLDER = """
import time
from specsparse.measure.machine import timing_lock
with timing_lock(print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_turn_of_a_killed_run_is_over(lock):
    child = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert child.stdout.readline() == "held\n" and is_held(lock)
    child.kill()
    child.communicate()
    assert not is_held(lock)


def test_a_lock_that_cannot_be_had_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECSPARSE_TIMING_LOCK", str(tmp_path / "no" / "such" / "folder"))
    with pytest.raises(UserError, match="SPECSPARSE_TIMING_LOCK=FILE"), timing_lock(print):
        pass


def test_a_file_that_is_no_lock_stays_as_it_is(tmp_path, monkeypatch):
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("four years of work")
    (tmp_path / "link").symlink_to(tmp_path / "not here")
    for name, says in (("thesis.tex", "is no lock but a file with something in it"), ("link", "cannot be locked")):
        monkeypatch.setenv("SPECSPARSE_TIMING_LOCK", str(tmp_path / name))
        with pytest.raises(UserError, match=says), timing_lock(print):
            pass
    assert thesis.read_text() == "four years of work" and not (tmp_path / "not here").exists()


@pytest.mark.parametrize(("kind", "alone"), [("speed", True), ("certify", False)])
def test_runs_that_measure_time_hold_the_machine(tmp_path, cells, lock, monkeypatch, kind, alone):
    seen = []

    def run_it(cfg, directory, **_):
        seen.append(lock.exists() and is_held(lock))
        return Done

    monkeypatch.setattr(runner, "run", run_it)
    assert run.main(["model=./model.gguf", f"kind={kind}"]) == 0
    assert seen == [alone]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Optuna's own
def test_optuna_finds_the_best_and_lives_with_invalid_combinations(tmp_path, cells, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    def run_it(cfg, directory, **_):
        cells.append(cfg.gamma)
        if cfg.gamma == 1:
            raise UserError("one is refused")
        files.write_atomically(directory / "record.json", '{"summary": {}}')
        return dataclasses.make_dataclass("RunResult", ["as_promised", "objective"])(True, -abs(cfg.gamma - 4.0))

    monkeypatch.setattr(runner, "run", run_it)
    more = ["hydra.sweeper.n_trials=12", "hydra.sweeper.params=null", "policy.gamma=range(1,7)"]
    assert run.main([*SWEEP, "sweep=optuna", "hydra.sweep.dir=runs/s/0", *more]) == 0
    best = (tmp_path / "runs" / "s" / "0" / "optimization_results.yaml").read_text()
    assert "policy.gamma: 4" in best and {1, 4} <= set(cells)
    assert len(cells) == len(set(cells) - {1}) + cells.count(1)  # what has finished is not run twice


def test_a_launcher_that_is_not_installed_says_how(capsys, tmp_path, monkeypatch):
    """rq's, which no extra of ours brings; those of ours are installed beside the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    assert run.main(["-m", "hydra/launcher=rq", "policy.gamma=1"]) == 2
    assert f"rq is not installed: {sys.executable} -m pip install hydra-rq-launcher" in capsys.readouterr().err


def test_a_ray_launcher_asks_whether_its_head_is_there(tmp_path, monkeypatch):
    sweeps.check_ray(None)  # another launcher
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        sweeps.check_ray({"init": {"address": address}})
    with pytest.raises(UserError, match=rf"no Ray head at {address}.*ray start --head"):
        sweeps.check_ray({"init": {"address": address}})
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(UserError, match="no Ray cluster runs on this machine"):
        sweeps.check_ray({"init": {"address": "auto"}})


MORTAL = """
import os, signal
from pathlib import Path
from specsparse.experiments.kind import RunResult
from specsparse.experiments.kinds.speed import Speed
class Mortal(Speed):
    def run(self, cfg, ctx):
        with Path(f"ran{cfg.gamma}").open("a") as file:
            file.write("x")
        if cfg.gamma == 1 and Path("decodes").exists():
            return super().run(cfg, ctx)
        if cfg.gamma == 2 and Path("ran2").read_text() == "x":
            os.kill(os.getpid(), signal.SIGKILL)
        return RunResult({})
"""


# Ray is slow: what ours asks of its cluster is above.
@pytest.fixture(params=of_matrix(["joblib", "local_jobs", "ray"], ["joblib", "local_jobs"]))
def launcher(request, tmp_path):
    """A launcher's name and the environment that it runs in; Ray has a cluster of its own."""
    plugin = {"local_jobs": "submitit"}.get(request.param, request.param)
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher", reason="pyproject's extras sweep and ray")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path), *filter(None, sys.path)])}
    environment["RAY_AUTH_MODE"] = "disabled"  # of the cluster of these tests
    if request.param != "ray":
        yield request.param, environment
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
               f"--port={address.partition(':')[2]}", "--include-dashboard=false", "--disable-usage-stats",
               "--num-cpus=1"]  # fmt: skip
    # `--block` is one process that takes the others with it; `ray stop` would stop every cluster of this machine.
    with tempfile.TemporaryDirectory() as short:  # a socket's path has at most 107 bytes
        head = subprocess.Popen([*command, f"--temp-dir={short}"], cwd=short, env=environment,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        for _ in range(600):  # until it listens
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", int(address.partition(":")[2]))).close()
                break
            time.sleep(0.2)
        yield "ray", {**environment, "RAY_ADDRESS": address}
        head.terminate()
        head.wait(60)


@pytest.mark.parametrize("gammas", ["1", pytest.param("1,2", marks=pytest.mark.slow)])
def test_launchers_run_a_real_cell_and_one_that_was_killed_again(tmp_path, launcher, gammas):
    """The second cell's worker is killed once; Ray starts it again by itself. Under joblib the first one decodes."""
    name, environment = launcher
    if name == "joblib":
        (tmp_path / "decodes").touch()
    write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0", tokenizer="spm", n_layers=1, context_length=512)
    (tmp_path / "mortal.py").write_text(MORTAL)
    command = [
        sys.executable, "-m", "specsparse.run", "-m", f"sweep={name}", "model=./tiny.gguf", "kind=mortal:Mortal",
        "policy=fixed", f"policy.gamma={gammas}", "max_tokens=8", "data.tasks=[code]", "data.limit_per_task=1",
        "data.chat=false", "warmup=false", "time_split=0", "stream=false", "name=s", "hydra.sweep.dir=runs/s",
    ]  # fmt: skip
    command += ["hydra.launcher.ray.remote.num_cpus=1"] if name == "ray" else []

    def run_sweep():
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    def recorded():
        records = [json.loads(f.read_text()) for f in sorted((tmp_path / "runs" / "s").glob("*/record.json"))]
        return [r["config"]["policy"]["gamma"] for r in records]

    done, wanted = run_sweep(), [int(gamma) for gamma in gammas.split(",")]
    kept = recorded()
    if 2 in wanted and name != "ray":
        lost = [gamma for gamma in wanted if gamma not in kept]  # joblib ends the worker of the first as well
        names = "; ".join(f"policy.gamma={gamma}" for gamma in lost)
        assert 2 in lost and done.returncode == 2 and f"({names})" in done.stderr.splitlines()[-1], done.stderr
        done = run_sweep()
    assert done.returncode == 0, done.stderr
    assert recorded() == wanted
    ran = {gamma: (tmp_path / f"ran{gamma}").read_text() for gamma in wanted}
    assert all(ran[gamma] == "x" for gamma in kept if gamma != 2) and ran.get(2, "xx") == "xx"
