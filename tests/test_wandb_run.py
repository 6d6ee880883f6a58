"""The real client in offline mode; what it wrote is read back from its file."""

import json
import struct
import time
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from specsparse import run, wandb_run
from tests.report import making

pytestmark = pytest.mark.filterwarnings("ignore")  # of the client
ROOT = Path(__file__).resolve().parent.parent
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


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One job of a sweep, published offline."""
    directory = tmp_path_factory.mktemp("s") / "2026" / "3"
    times = {("chat-1", "chat"): (2.0, 1.0), ("code-1", "code"): (4.0, 1.0)}
    making.speed_run(directory, making.passes(times))
    wandb_run.publish(directory, {"mode": "offline", "project": "tests", "group": None})
    (file,) = directory.glob("wandb/offline-run-*/*.wandb")
    return file, list(records(written_whole(file)))


def test_config_name_and_group_of_the_sweep(written):
    (client,) = [r.run for r in written[1] if r.WhichOneof("record_type") == "run"]
    assert (client.project, client.display_name, client.run_group, client.job_type) == (
        "tests",
        "made",
        "2026",
        "speed",
    )
    config = items(client.config.update)
    assert config["policy"] == {"name": "fixed", "gamma": 2} and config["kind"] == "speed"
    assert {"speed", "prompt_lookup", "greedy"} <= set(client.tags)


def test_passes_histograms_tables_and_figures(written):
    history = [items(r.history.item) for r in written[1] if r.WhichOneof("record_type") == "history"]
    assert [step["rates/tokens_per_second"] for step in history[:4]] == [10.0, 20.0, 5.0, 20.0]
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


def test_the_summary_has_the_record_s_numbers_and_acceptance_by_position(written):
    summary = {}
    for record in written[1]:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    flat = json.dumps(summary)
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
