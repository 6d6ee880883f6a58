import json
import os

import numpy as np
import pytest

from specsparse.errors import UserError
from specsparse.experiments import trackers
from specsparse.support import files
from specsparse.support.registry import Choice


def test_rows_then_one_record(tmp_path):
    tracker = trackers.Tracker(tmp_path / "run")
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
        trackers.options_of_tracker(Choice(name, options))
