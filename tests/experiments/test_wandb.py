"""The real client in offline mode; what it wrote is read back from its file."""

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from specsparse import run
from specsparse.experiments.trackers.base import Series
from specsparse.experiments.trackers.wandb import Wandb
from specsparse.testing import check_tracker
from tests.experiments.playing import run_config
from tests.report import making

pytestmark = pytest.mark.filterwarnings("ignore")  # of the client
ROOT = Path(__file__).resolve().parents[2]
BLOCK, HEADER = 32768, 7


def records(file):
    """The protobuf records of a .wandb file, which is a LevelDB log after seven bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + HEADER])
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # full, or the last part
            yield Record.FromString(whole)
            whole = b""


def items(part):
    """Values by key; the client spreads a dictionary over items with nested keys."""
    out = {}
    for item in part:
        *path, last = item.nested_key or [item.key]
        inner = out
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return out


def written_whole(file):
    """Wait for the client's own process, which writes the end a moment after `finish`."""
    deadline = time.monotonic() + 20
    while b"acceptance_per_position/speculative/2" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return file


def published(directory, options):
    """The records of a run with two prompts, and the line that `publish` returns."""
    times = {("chat-1", "chat"): (2.0, 1.0), ("code-1", "code"): (4.0, 1.0)}
    making.speed_run(directory, making.passes(times))
    record = json.loads((directory / "record.json").read_text())
    record["manifest"] |= {"git": {"commit": "c0ffee"}, "model": {"sha256": "ab12"}, "kernels": {"isa": "avx2"}}
    record["trained"] = [str(directory / "trained" / "made.gguf")]
    (directory / "trained").mkdir()
    (directory / "trained" / "made.gguf").write_bytes(b"GGUF")
    (directory / "record.json").write_text(json.dumps(record))
    (directory / "curve.csv").write_text("step,loss,note\n1,0.5,first\n2,,\n")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        tracker, cfg = Wandb(**options), run_config("m.gguf", name="made", composed=record["config"])
        client = tracker.start(cfg, directory, None)
        for step in (25, 50):
            tracker.log(client, Series("training", "step", least=("loss",)), {"step": step, "loss_1": 10 / step})
        line = tracker.finish(client, directory)
    assert "WARNING" not in said.getvalue()
    return line, [list(records(written_whole(f))) for f in directory.glob("wandb/offline-run-*/*.wandb")]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """One job of a sweep, published offline: its folder, its last line, its records."""
    directory = tmp_path_factory.mktemp("s") / "2026" / "3"
    line, (found,) = published(directory, {"mode": "offline", "project": "tests", "group": None})
    return directory, line, found


@pytest.fixture
def written(sweep):
    (file,) = sweep[0].glob("wandb/offline-run-*/*.wandb")
    return file, sweep[2]


@pytest.fixture
def history(written):
    """What was logged, step by step."""
    return [items(r.history.item) for r in written[1] if r.WhichOneof("record_type") == "history"]


def summary_of(found):
    out = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            out |= items(record.summary.update)
    return out


def test_config_name_and_group_of_the_sweep(written):
    (client,) = [r.run for r in written[1] if r.WhichOneof("record_type") == "run"]
    assert (client.project, client.display_name, client.run_group, client.job_type) == (
        "tests",
        "made",
        "2026",
        "speed",
    )
    config = items(client.config.update)
    for later in written[1]:
        config |= items(later.config.update)
    assert config["policy"] == {"name": "fixed", "gamma": 2} and config["kind"] == "speed"
    assert {"speed", "prompt_lookup", "greedy"} <= set(client.tags)
    assert config["manifest"]["git"]["commit"] == "c0ffee" and config["manifest"]["model"]["sha256"] == "ab12"
    assert config["manifest"]["kernels"] == {"isa": "avx2"} and "config" not in config["manifest"]


def test_a_step_is_a_prompt_and_each_side_has_metrics_of_its_own(history):
    rates = ["passes/plain/rates/tokens_per_second", "passes/speculative/rates/tokens_per_second"]
    names = ["passes/task", "passes/prompt_id", "passes/repeat", *rates]
    steps = [[step.get(name) for name in names] for step in history[2:4]]
    assert steps == [["chat", "chat-1", 0, 10.0, 20.0], ["code", "code-1", 0, 5.0, 20.0]]
    assert not [key for step in history for key in step if key.startswith(("rates/", "counters/"))]


def test_a_curve_is_drawn_over_its_steps_and_its_least_is_the_summary_s(written, history):
    assert [(point["training/step"], point["training/loss_1"]) for point in history[:2]] == [(25, 0.4), (50, 0.2)]
    (loss,) = [r.metric for r in written[1] if r.metric.name == "training/loss_1"]
    assert loss.step_metric == "training/step" and loss.summary.min and loss.summary.last
    assert summary_of(written[1])["training/loss_1"] == {"last": 0.2, "min": 0.2}


def test_the_files_of_the_run_and_what_it_trained_are_artifacts(written):
    found = {r.artifact.name: r.artifact for r in written[1] if r.artifact.type in ("record", "model")}
    record, head = found["speed-made"], found["trained-made"]
    files = {Path(entry.path).name for entry in record.manifest.contents}
    assert record.type == "record" and {"record.json", "prompts.jsonl", "curve.csv"} <= files
    (entry,) = head.manifest.contents
    assert head.type == "model" and entry.local_path.endswith("/trained/made.gguf")
    about = json.loads(head.metadata)
    assert about["kind"] == "speed" and about["commit"] == "c0ffee" and about["results"]["load_s"] == 0.1


def test_the_last_line_names_the_folder_and_the_command(sweep, written):
    says, folder = sweep[1].split(" wandb sync ")
    assert says == "wandb: written offline; to send it:" and Path(folder).resolve() == written[0].parent.resolve()


def test_disabled_writes_nothing_and_says_so(tmp_path):
    line, found = published(tmp_path, {"mode": "disabled"})
    assert line == "wandb: disabled, nothing was written" and not found


def test_histograms_tables_and_figures(written, history):
    logged = {key: value for step in history for key, value in step.items()}
    rounds = logged["accepted_in_a_round/speculative"]
    assert rounds["_type"] == "histogram" and rounds["values"] == [8, 4, 8]
    assert rounds["bins"] == [-0.5, 0.5, 1.5, 2.5]
    assert sum(logged["speedup_by_prompt/speculative"]["values"]) == 2
    assert logged["prompts"]["_type"] == "table-file" and logged["prompts"]["nrows"] == 4
    stored = json.loads((written[0].parent / "files" / logged["prompts"]["path"]).read_text())
    first = dict(zip(stored["columns"], stored["data"][0], strict=True))
    assert first["text"] == "text of chat-1" and first["side"] == "plain" and len(first["prompt"]) > 20
    figures = {key for key in logged if key.startswith("figures/")}
    assert {"figures/speedup_by_task", "figures/acceptance_by_position"} <= figures
    for name in figures:
        assert (written[0].parent / "files" / logged[name]["path"]).read_bytes()[:4] == b"\x89PNG"
        assert logged[name.replace("figures/", "tables/")]["_type"] == "table-file"
    curve = json.loads((written[0].parent / "files" / logged["tables/curve"]["path"]).read_text())
    assert curve["columns"] == ["step", "loss", "note"] and curve["data"] == [[1, 0.5, "first"], [2, None, None]]


def test_the_summary_is_the_record_s_and_no_prompt_s(written):
    summary = summary_of(written[1])
    flat = json.dumps(summary)
    assert not [key for key in summary if key.startswith(("passes", "rates", "counters"))]
    assert "ratio_of_totals" in flat and "num_accepted_tokens_per_pos" in flat
    assert summary["acceptance_per_position/speculative/1"] == 0.6
    assert summary["acceptance_per_position/speculative/2"] == 0.4


def test_the_sweep_for_wandb_agent_composes():
    """Each of its command lines is one that Hydra takes."""
    sweep = yaml.safe_load((ROOT / "experiments" / "wandb_sweep.yaml").read_text())
    fixed = [part for part in sweep["command"] if "=" in part]
    chosen = [f"{key}={values['values'][-1]}" for key, values in sweep["parameters"].items()]
    with initialize_config_dir(str(run.conf_dir()), version_base="1.3"):
        cfg = compose("config", run.shorthand([*fixed, *chosen]))
    assert (cfg.policy.gamma, cfg.drafter.name, cfg.tracker.name) == (8, "suffix", "wandb")
    assert sweep["metric"]["name"].split("/")[0] == "speculative"


KILLER = '''
import os, subprocess
from specsparse.experiments.kind import Kind, RunResult
from specsparse.experiments.trackers.base import Series

CURVE = Series("training", "step")


class Killer(Kind):
    """Ends the client's own process half way."""

    timed = takes_model = False

    def check(self, cfg):
        pass

    def run(self, cfg, ctx):
        for step in range(40):
            ctx.tracker.point(CURVE, {"step": step, "loss": 1 / (step + 1)})
            if step == 20:
                service = int(subprocess.check_output(["pgrep", "-P", str(os.getpid()), "wandb-core"]))
                os.kill(service, 9)
                os.waitpid(service, 0)
        return RunResult({"steps": 40})
'''


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_it_keeps_the_contract_of_a_tracker(mode):
    check_tracker(Wandb(mode=mode))


@pytest.mark.slow
def test_a_killed_service_is_one_line_and_the_files_are_whole(tmp_path):
    (tmp_path / "killer.py").write_text(KILLER)
    command = [sys.executable, "-m", "specsparse.run", "kind=killer:Killer", "tracker=wandb", "hydra.run.dir=run"]
    env = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("tracker=wandb failed: ")]) == 1
    assert json.loads((tmp_path / "run" / "record.json").read_text())["summary"] == {"steps": 40}
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 40
