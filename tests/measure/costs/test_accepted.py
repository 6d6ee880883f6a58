"""Where acceptance is from: records of runs, and the table of kept rates."""

import json

import pytest
import yaml

from specsparse.data import prompts
from specsparse.errors import UserError
from specsparse.measure.costs import acceptance
from specsparse.models import catalogue
from specsparse.runtime import metrics
from specsparse.runtime.metrics import Counters
from specsparse.speculative.drafters import DRAFTERS
from tests.report.making import passes, speed_run

COUNTED = Counters(
    num_rounds=10, num_drafts=8, num_draft_tokens=24, num_tested=20, num_accepted_tokens=12,
    num_accepted_tokens_per_pos=(6, 4, 2), num_emitted_tokens=22,
)  # fmt: skip
IDLE = Counters(num_rounds=9, num_emitted_tokens=9)


def written(tmp_path, record):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_a_comparison_counts_for_each_drafter(tmp_path):
    def tasks(**by_task):
        return {task: {"speculative": {"counters": metrics.to_dict(c)}} for task, c in by_task.items()}

    rows = [
        {"name": "suffix x greedy", "tasks": tasks(all=COUNTED + IDLE, chat=COUNTED, code=IDLE)},
        {"name": "model x greedy", "tasks": tasks(all=IDLE, chat=IDLE)},
    ]
    found = acceptance.from_record(written(tmp_path, {"kind": "compare", "methods": rows}))
    assert found.keys() == {"suffix"}  # the other drafted nothing
    assert found["suffix"].tasks["chat"].reach == (6 / 8, 4 / 8, 2 / 8) and found["suffix"].tasks["chat"].share == 0.8
    assert found["suffix"].tasks["code"].tokens(3) == 1.0


def test_a_run_with_one_method_counts_for_its_drafter_and_trees_do_not(tmp_path):
    file = speed_run(tmp_path / "run", passes({("a", "chat"): (4.0, 2.0), ("b", "code"): (3.0, 1.0)})) / "record.json"
    found = acceptance.from_record(file)["prompt_lookup"]
    assert found.tasks.keys() == {"chat", "code"} and found.alpha == 10 / 16
    record = json.loads(file.read_text())
    record["method"]["levels"] = 3
    with pytest.raises(UserError, match="no method of this run drafted chains"):
        acceptance.from_record(written(tmp_path, record))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_tested", 1, "alpha=12.0"),
        ("num_accepted_tokens_per_pos", (9, -1), r"reach"),
        ("num_rounds", 4, "share=2.0"),
    ],
)
def test_counters_that_contradict_one_another_are_one_line(tmp_path, name, value, said):
    sides = {"speculative": {"counters": {**metrics.to_dict(COUNTED), name: value}}}
    record = {"method": {"drafter": "head"}, "summary": {}, "tasks": {"chat": sides}}
    with pytest.raises(UserError, match=rf"record\.json: head, chat\.{said}"):
        acceptance.from_record(written(tmp_path, record))
    sides["speculative"]["counters"][name] = "x"
    with pytest.raises(UserError, match=r"is no record\.json of a run"):
        acceptance.from_record(written(tmp_path, record))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "{}", '{"kind": "compare", "methods": [{}]}'])
def test_another_file_is_no_record(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"record\.json: is no record\.json of a run"):
        acceptance.from_record(path)


def test_the_kept_rates_are_of_models_and_drafters_that_there_are():
    rows = yaml.safe_load(acceptance.KEPT.read_text(encoding="utf-8"))
    assert len(acceptance.kept_rates()) == len(rows) > 0
    for (target, drafter), found in acceptance.kept_rates().items():
        assert catalogue.find(target) and (DRAFTERS.holds(drafter) or catalogue.find(drafter)), drafter
        assert found.source
        for one in found.tasks.values():
            assert list(one.reach) == sorted(one.reach, reverse=True)  # no position without the one before it


def test_the_kept_rates_cover_the_built_in_texts_for_every_drafter_and_say_where_they_are_from():
    tasks = {prompt.task for prompt in prompts.load()}
    names = ("prompt_lookup", "ngram_simple", "suffix", "smollm2-draft", "head", "layer_skip")
    for name in names:
        kept = acceptance.kept_rates()["smollm2-135m", name]
        assert kept.tasks.keys() == tasks and "compare at" in kept.source
        assert all(bool(a.ranks) == (name in names[3:]) and sum(a.ranks) <= 1.004 for a in kept.tasks.values())
    assert len(tasks) == 8
