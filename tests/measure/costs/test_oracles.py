import dataclasses
from types import SimpleNamespace

import pytest

from specsparse.experiments.kinds.speed import explain
from specsparse.measure.costs.explain import oracles
from specsparse.report import record
from specsparse.report.record import PLAIN, SPECULATIVE, Pass, RunRecord
from specsparse.runtime import metrics
from specsparse.runtime.metrics import Counters, Times

# Ten rounds, eight with a draft of three; 12 accepted: 6 at the first position, 4 at the second, 2 at the third.
RUN = Counters(
    num_rounds=10, num_drafts=8, num_draft_tokens=24, num_tested=20, num_accepted_tokens=12,
    num_accepted_tokens_per_pos=(6, 4, 2), num_emitted_tokens=22, target_passes=11,
    times=Times(prefill=1.0, draft=0.2, verify=0.7, sample=0.1, total=1.0), alpha=12.5, alpha_var=4.0,
    num_alpha_tested=20,
)  # fmt: skip


def test_alpha_stands_beside_the_realised_rate():
    r = metrics.rates(RUN)
    assert (r["alpha"], r["realised_alpha"], r["alpha_z"]) == (12.5 / 20, 12 / 20, -0.25)
    assert metrics.rates(Counters(num_tested=3))["alpha"] is None
    assert metrics.rates(dataclasses.replace(RUN, alpha_var=-1e-7))["alpha_z"] is None  # a sum of zeros, rounded
    both = RUN + RUN
    assert (both.alpha, both.alpha_var) == (25.0, 8.0)
    assert metrics.rates(both + Counters(num_tested=60))["alpha"] == 12.5 / 20  # of the positions where it was measured


def test_a_measured_alpha_of_zero_is_not_one_that_was_not_measured():
    never = Counters(num_rounds=2, num_drafts=2, num_draft_tokens=6, num_tested=2, num_alpha_tested=2)
    assert metrics.rates(never)["alpha"] == 0.0
    again = metrics.from_dict(metrics.to_dict(never))
    assert again == never
    old = {k: v for k, v in metrics.to_dict(RUN).items() if k != "num_alpha_tested"}  # records from before
    assert metrics.rates(metrics.from_dict(old))["alpha"] == 12.5 / 20
    assert metrics.rates(metrics.from_dict({**old, "alpha": 0.0}))["alpha"] is None


def test_other_projects_count_differently():
    assert metrics.export(RUN, "llama.cpp")["accept"] == 50.0
    tree = metrics.export(RUN, "llama.cpp", tree=True)
    assert tree == {"n_predict": 22, "n_drafted": None, "n_accept": 12, "accept": None}
    assert metrics.export(RUN, "sglang", tree=True) == metrics.export(RUN, "sglang")
    assert metrics.export(RUN, "sglang") == {"spec_verify_ct": 10, "accept_length": 2.2, "accept_rate": 22 / 24}
    with pytest.raises(ValueError, match="style='vllm' must be one of llama"):
        metrics.export(RUN, "vllm")
    assert metrics.export(RUN, "spec-bench") == {"mean_accepted_tokens": 2.2, "tokens_per_second": 11.0}


def test_oracles():
    found = oracles(RUN, 1.5, v=lambda n: 1 + 0.3 * (n - 1))
    assert found["free_draft"] == 1.5 / 0.8
    assert found["perfect_draft"] == 1.5 * 34 / 22
    # tokens 10, 16, 20, 22 in 10, 10 + 8 * .3 g steps
    assert found["best_gamma"] == {"gamma": 2, "speedup": 20 / 14.8}
    silent = oracles(Counters(), 1.0)
    assert silent == {"free_draft": None, "perfect_draft": None, "best_gamma": None}


def test_a_tree_has_one_right_path_and_no_draft_length():
    """The same rounds as trees of three nodes on two levels: a perfect tree adds two tokens a draft, not three."""
    found = oracles(RUN, 1.5, v=lambda n: 1 + 0.3 * (n - 1), levels=2)
    assert found["perfect_draft"] == 1.5 * (10 + 8 * 2) / 22
    assert found["best_gamma"] is None and found["free_draft"] == 1.5 / 0.8


@pytest.mark.parametrize("levels", [None, 2])
def test_a_record_says_whether_its_drafts_were_trees(levels):
    plain = dataclasses.replace(RUN, num_drafts=0, num_draft_tokens=0)
    sides = {PLAIN: plain, SPECULATIVE: RUN}
    done = [Pass("a", "chat", side, 0, (), "", "length", c, 0.1, 5, 1.0, 0.0) for side, c in sides.items()]
    found = RunRecord(
        name="made", method={"drafter": "model", "gamma": 3, **({"levels": levels} if levels else {})},
        groups=record.groups(done, bytes_per_pass=1, read_bandwidth=None), identity=None, load_s=0.0,
        first_text_s=None, compile_s=0.0, read_bandwidth=None, bytes_per_pass=1,
    )  # fmt: skip
    findings = explain(found, done, SimpleNamespace(policies=[]), split={}, table=None, drafter="model").findings
    assert findings["oracles"]["perfect_draft"] == pytest.approx((10 + 8 * (levels or 3)) / 22)
    assert findings["exports"]["llama.cpp"]["n_drafted"] == (None if levels else 24)
