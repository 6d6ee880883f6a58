"""From runs on disk to the page: what is found, computed, drawn and left out."""

import base64
import csv
import html
import io
import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from specsparse.cli import main as cli
from specsparse.errors import UserError
from specsparse.experiments import sweeps
from specsparse.experiments.kinds import compare, speed
from specsparse.measure import conditions
from specsparse.measure.conditions import Conditions
from specsparse.report import figures, methods, pages, plots, record, runs
from specsparse.report.plots import MOST
from specsparse.report.record import HOST, PLAIN, SPECULATIVE
from specsparse.speculative.verifiers import get_verifier
from tests.report import making

CHAT, CODE = ("chat-1", "chat"), ("code-1", "code")
STOOD_IN = {"stand_in": {"asked": {"model": "a"}, "used": {"model": "b"}, "why": "download=no"}}
TIMES = {CHAT: (2.0, 1.0), ("chat-2", "chat"): (2.0, 2.0), CODE: (4.0, 1.0), ("code-2", "code"): (4.0, 2.0)}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two draft lengths at two temperatures, as a multirun leaves them."""
    directory = tmp_path_factory.mktemp("sweep")
    split = {"draft": 0.1, "verify": 0.7, "sample": 0.1, "commit": 0.1}
    cells = [(g, t) for g in (2, 4) for t in (0.0, 0.8)]
    for job, (gamma, heat) in enumerate(cells):
        times = {key: (plain, method * (1 + heat) * gamma / 2) for key, (plain, method) in TIMES.items()}
        making.speed_run(
            directory / str(job), making.passes(times), split=split, policy__gamma=gamma, sampling__temperature=heat
        )
    return directory


def made(directory):
    found = runs.find([directory])
    return {f.name: f for f in figures.make(found, methods.from_runs(found))[0]}


def rows_of(figure):
    return list(csv.DictReader(io.StringIO(plots.csv_text(figure.rows))))


def test_repeats_of_a_prompt_are_one_sample(tmp_path):
    done = [
        making.one("a", "chat", side, seconds, repeat=repeat)
        for repeat, times in enumerate([(2.0, 1.0), (4.0, 1.0)])
        for side, seconds in zip(("plain", "speculative"), times, strict=True)
    ]
    (method,) = methods.from_runs(runs.find([making.speed_run(tmp_path / "run", done)]))
    assert method.speedup()[:4] == (3.0, None, None, 1)
    assert method.measured("draft acceptance rate").value == 0.5 and method.accepted_at(1).value == 0.4
    assert method.measured("tokens per second").value == 20.0


def test_a_sweep_names_its_methods_by_what_varied(sweep):
    found = methods.from_runs(runs.find([sweep]))
    assert [m.label for m in found] == ["gamma 2, T 0", "gamma 2, T 0.8", "gamma 4, T 0", "gamma 4, T 0.8"]
    assert methods.constants(found) == ["prompt_lookup x greedy"]
    assert found[0].without(methods.GAMMA) == "T 0"


def test_two_runs_of_one_config_are_told_apart_by_their_directories(tmp_path):
    for name in ("one", "two"):
        making.speed_run(tmp_path / name, making.passes(TIMES))
    labels = [m.label for m in methods.from_runs(runs.find([tmp_path]))]
    assert len(set(labels)) == 2 and all(label.endswith(n) for label, n in zip(labels, ("one", "two"), strict=True))


def test_speedups_of_the_figures_are_those_of_the_passes(sweep):
    found = made(sweep)
    by_task = {(r["method"], r["task"]): r for r in rows_of(found["speedup_by_task"])}
    assert float(by_task["gamma 2, T 0", "all"]["value"]) == 2.0  # 12 / 6
    assert float(by_task["gamma 2, T 0", "code"]["value"]) == pytest.approx(8 / 3)
    assert by_task["gamma 2, T 0", "code"]["prompts"] == "2"
    low, high = (float(by_task["gamma 2, T 0", "all"][k]) for k in ("low", "high"))
    assert low < 1.0 and high > 4.0 and by_task["gamma 2, T 0", "code"]["low"] == ""  # four prompts, and two
    lines = {
        (r["method"], r["tokens drafted in a round"]): float(r["value"]) for r in rows_of(found["speedup_by_gamma"])
    }
    assert lines == pytest.approx({("T 0", "2"): 2, ("T 0", "4"): 1, ("T 0.8", "2"): 2 / 1.8, ("T 0.8", "4"): 1 / 1.8})
    heats = {r["method"] for r in rows_of(found["speedup_by_temperature"])}
    assert heats == {"gamma 2", "gamma 4"}
    for name, lines in (("acceptance_by_gamma", {"T 0", "T 0.8"}), ("acceptance_by_temperature", heats)):
        assert {(r["method"], r["value"]) for r in rows_of(found[name])} == {(line, "0.5") for line in lines}


def test_a_run_that_says_no_temperature_is_on_no_line(tmp_path):
    for name, heat in (("none", None), ("half", 0.5), ("warm", 0.8)):
        making.speed_run(tmp_path / name, making.passes(TIMES), sampling__temperature=heat)
    drawn = {row["temperature of the target"] for row in made(tmp_path)["speedup_by_temperature"].rows}
    assert drawn == {0.5, 0.8}


def test_acceptance_and_rounds(sweep):
    found = made(sweep)
    first = [r for r in rows_of(found["acceptance_by_position"]) if r["method"] == "gamma 2, T 0"]
    assert [(r["position"], float(r["value"])) for r in first] == [("1", 0.6), ("2", 0.4)]
    rounds = [r for r in rows_of(found["accepted_in_a_round"]) if r["method"] == "gamma 2, T 0"]
    assert [float(r["value"]) for r in rounds] == pytest.approx([0.4, 0.2, 0.4])
    assert {r["value"] for r in rows_of(found["acceptance_by_task"])} == {"0.5"}


def test_shares_of_the_stages(sweep):
    first = [r for r in rows_of(made(sweep)["time_split"]) if r["method"] == "gamma 2, T 0"]
    assert {r["stage"]: float(r["value"]) for r in first} == pytest.approx(
        {"draft": 0.1, "verify": 0.7, "sample": 0.1, "commit": 0.1}
    )
    assert first[0]["tasks"] == "2"


def test_predictions_and_roofline(tmp_path):
    factors = [{"name": "acceptance", "value": 0.5, "text": ""}]
    explained = {"explanation": {"predicted": 4.0, "factors": factors}}
    making.speed_run(tmp_path / "speed", making.passes(TIMES), findings=explained)
    forwards = [
        {"n": n, "predicted_v": 1.0, "bound": "memory", "measured_v": v, "spread": 0.1} for n, v in ((1, 1.0), (4, 1.5))
    ]
    making.write(tmp_path / "roofline", {"name": "r", "summary": {"forwards": forwards, "device": {"title": "cpu"}}})
    found = made(tmp_path)
    (row,) = rows_of(found["predicted_and_measured"])
    assert (row["predicted"], row["value"], row["x acceptance"]) == ("4.0", "2.0", "0.5")
    costs = rows_of(found["verify_cost"])
    assert [(r["n"], r["value"]) for r in costs] == [("1", "1.0"), ("4", "1.5")]
    assert float(costs[1]["low"]) == pytest.approx(1.35)


def test_quality_against_speed_from_every_kind_that_measures_both(tmp_path):
    """As train_predictors, sparsity and quant_table write it."""
    cost = {"predictor_bytes": 10, "sparse_bytes": 40, "dense_bytes": 100}
    evaluation = {"name": "svd", "model": {"kl": 0.2, "perplexity": 9.0}, "cost": cost}
    faster = {"ratio_of_totals": 1.5, "low": 1.4, "high": 1.7}
    point = {"value": 0.5, "quality": evaluation, "by_bytes": 2.0, "speedup": faster}
    types = [
        {"type": t, "kl_mean": kl, "kl_error": 0.01, "perplexity": 10.0, "decode": {"median": speed}}
        for t, kl, speed in (("Q8_0", 0.1, 100.0), ("Q4_0", 0.2, 150.0), ("Q4_1", 0.3, 140.0))
    ]
    summaries = {"a": {"evaluations": [evaluation]}, "b": {"points": [point]}, "c": {"rows": types}}
    for name, summary in summaries.items():
        making.write(tmp_path / name, {"name": name, "summary": summary})
    rows = {r["method"]: r for r in rows_of(made(tmp_path)["quality_and_speed"])}
    assert float(rows["svd"]["speed"]) == 2.0 and rows["svd"]["speed_low"] == ""
    assert (rows["svd, 0.5"]["speed"], rows["svd, 0.5"]["speed_low"]) == ("1.5", "1.4")
    assert float(rows["Q8_0"]["kl_high"]) == pytest.approx(0.1196)
    assert [rows[t]["on the front"] for t in ("Q8_0", "Q4_0", "Q4_1")] == ["True", "True", "False"]


def test_unions_of_kept_neurons(tmp_path):
    text = [
        {"rows": n, "batch": 1, "passes": 9, "kept": 0.3, "union": u, "guess": g}
        for n, u, g in ((1, 0.3, 0.3), (4, 0.5, 0.8))
    ]
    making.write(tmp_path / "a", {"name": "a", "summary": {"text": [*text, {**text[1], "batch": 4}], "seen": text}})
    rows = rows_of(made(tmp_path)["union_size"])
    assert [(r["rows"], r["union"], r["guess"]) for r in rows] == [("1", "0.3", "0.3"), ("4", "0.5", "0.8")] * 2


def test_acceptance_over_the_text_of_a_training(tmp_path):
    for name, live in (("a", 1.3), ("b", 1.5)):
        curve = [{"rows": n, "acceptance": 1.1 + live * n / 900, "live": 1 + (live - 1) * n / 900} for n in (0, 900)]
        making.write(tmp_path / name, {"name": name, "summary": {"curve": curve}, "trained": [f"heads/{name}.gguf"]})
    rows = rows_of(made(tmp_path)["acceptance_by_text"])
    live = {(r["drafter"], r["tokens"]): r["value"] for r in rows if r["drafts"] == "where decoding begins drafts"}
    assert live == {("a.gguf", "0"): "1.0", ("a.gguf", "900"): "1.3", ("b.gguf", "0"): "1.0", ("b.gguf", "900"): "1.5"}


def test_the_pareto_front():
    from specsparse.report.figures import front

    assert front([(1.0, 0.0), (2.0, 0.1), (1.5, 0.2), (3.0, 0.1), (0.5, 0.0)]) == {0, 3}
    assert front([(1.0, 0.1), (1.0, 0.1)]) == {0, 1}  # equals do not beat each other


def test_the_page_needs_nothing_beside_it(sweep, tmp_path):
    written = pages.write(runs.find([sweep]), tmp_path / "out", title="a <b> & c")
    text = written.page.read_text()
    assert "a &lt;b&gt; &amp; c" in text and "<script" not in text
    links = re.findall(r"(?:src|href)=\"([^\"]{1,60})", text)
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert {f.name for f in written.made} == {p.stem for p in (tmp_path / "out" / "figures").glob("*.png")}
    for figure in written.made:
        stored = (tmp_path / "out" / "figures" / f"{figure.name}.csv").read_text()
        inside = re.search(rf'download="{figure.name}.csv" href="data:text/csv;base64,([^"]+)"', text)
        assert base64.b64decode(inside.group(1)).decode() == stored
        assert (tmp_path / "out" / "figures" / f"{figure.name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {m.name for m in written.missing} == {
        "predicted_and_measured",
        "verify_cost",
        "quality_and_speed",
        "union_size",
        "sparsity",
        "by_context",
        "acceptance_by_text",
    }
    assert all(m.why in text.replace("&#39;", "'") for m in written.missing)


def test_a_figure_is_the_same_file_for_the_same_numbers(sweep):
    once, again = (made(sweep)["speedup_by_gamma"].data_uri() for _ in range(2))
    assert once == again


@pytest.fixture
def undrawn(monkeypatch):
    """Pages without their pictures, which take two seconds: for what they say."""
    monkeypatch.setattr(plots.Figure, "_image", lambda figure, kind: b"")


def test_a_broken_promise_and_different_machines_come_first(tmp_path):
    done = making.passes(TIMES)
    done[1] = making.one(*CHAT, "speculative", 1.0, ids=(7,) * 20)
    making.speed_run(tmp_path / "a", done, kernels={"kernels": "native", "isa": "avx2", "native": True})
    making.speed_run(tmp_path / "b", done, kernels={"kernels": "reference", "native": False}, policy__gamma=3)
    lines = pages.warnings(runs.find([tmp_path]))
    assert sum("against the promise" in line for line in lines) == 2
    assert any("kernels: native avx2, reference" in line for line in lines)
    assert any("slow reference kernels" in line for line in lines)
    stood_in = [replace(run, record=run.record | STOOD_IN) for run in runs.find([tmp_path])]
    first, second, third, *_, last = pages.warnings(stood_in)
    assert "stand-in: " in first and "stand-in: " in second
    assert "against the promise" in third and "do not share one" in last
    assert runs.disagreements([]) == pages.warnings([]) == []


@pytest.mark.usefixtures("undrawn")
def test_runs_of_a_busy_hour_are_not_ranked_without_a_word(tmp_path):
    """The same work at 102 and 160 plain tokens a second; a third run of another length is other work."""
    for name, read, plain, gamma in (("a", 28.4e9, 160.0, 2), ("b", 18.1e9, 102.0, 4)):
        taken = Conditions(read, plain_tokens_per_second=plain, other_load=0.7)
        making.speed_run(tmp_path / name, making.passes(TIMES), taken=taken, policy__gamma=gamma)
    found = runs.find([tmp_path])
    line = "taken more than 10% apart: read bandwidth 18.1 to 28.4 GB/s, plain decoding 102.0 to 160.0 tok/s"
    assert [said for said in pages.warnings(found) if said.startswith(line)]
    assert not [said for said in pages.warnings(found[:1]) if "apart" in said]
    text = pages.write(found, tmp_path / "out", title="t").page.read_text()
    assert line in text
    for cell in ("28.4 GB/s, plain decoding 160.0 tok/s, other", "18.1 GB/s, plain decoding 102.0 tok/s, other"):
        assert f'<td class="text">read bandwidth {cell}' in text
    assert "<th>rank</th>" not in text and 'class="best"' not in text and "no ranks: " in text  # the same times


@pytest.mark.usefixtures("undrawn")
def test_a_clear_winner_is_no_tie(tmp_path):
    for gamma, slower in ((2, 1.0), (4, 9.0)):
        times = {(f"p{i}", "chat"): (2.0, slower * (1 + i / 50)) for i in range(4)}
        making.speed_run(tmp_path / str(gamma), making.passes(times), policy__gamma=gamma)
    text = pages.write(runs.find([tmp_path]), tmp_path / "out", title="t").page.read_text()
    assert "<td>1</td>" in text and "<td>2</td>" in text and conditions.TIED not in text
    assert text.count('class="best"') == 1


@pytest.mark.usefixtures("undrawn")
def test_one_prompt_is_not_ranked_beside_six_on_the_page(tmp_path):
    """Nor is it among the fastest that a figure keeps, if others have an interval."""
    for gamma, prompts, slower in ((2, 6, 1.0), (4, 6, 9.0), (8, 1, 0.1)):
        times = {(f"p{i}", "chat"): (2.0, slower * (1 + i / 50)) for i in range(prompts)}
        making.speed_run(tmp_path / str(gamma), making.passes(times), policy__gamma=gamma)
    found = methods.from_runs(runs.find([tmp_path]))
    assert [m.label for m in methods.ranked(found)] == ["gamma 2", "gamma 4", "gamma 8"]
    text = pages.write(runs.find([tmp_path]), tmp_path / "out", title="t").page.read_text()
    assert "<td>gamma 8</td><td>–</td>" in text and "no rank for 1 of 3" in text


def test_methods_of_a_comparison_leave_out_what_all_share(tmp_path):
    """Its sides are named drafter x verifier, and are told apart as those of runs are."""
    done = [making.one("a", "chat", PLAIN, 2.0)]
    done += [making.one("a", "chat", f"prompt_lookup x {v}", took) for v, took in (("greedy", 1.0), ("match", 1.5))]
    found = methods.from_runs([runs.read(making.speed_run(tmp_path / "run", done))])
    assert [m.label for m in found] == ["greedy", "match"]
    assert methods.constants(found)[0] == "drafter prompt_lookup"


def test_a_legend_leaves_out_what_all_share():
    shared = ["lookup x greedy, gamma 2, T 0", "lookup x greedy, gamma 4, T 0"]
    assert plots.without_shared(shared) == ["gamma 2", "gamma 4"]
    assert plots.without_shared(["a, b", "a"]) == ["a, b", "a"]  # nothing would be left of the second


@pytest.mark.usefixtures("undrawn")
def test_a_machine_that_changed_between_the_sides_is_named(tmp_path):
    """Twenty tokens in ten passes are two a pass; four times as fast is not the method's doing."""
    making.speed_run(tmp_path / "run", making.passes({CHAT: (4.0, 1.0)}), taken=Conditions(20e9, 0.2))
    found = runs.find([tmp_path])
    assert pages.doubts(methods.from_runs(found))[0].endswith(conditions.impossible(4.0, 2.0))
    assert any("the machine was busy" in line for line in pages.warnings(found))
    assert "is impossible with 2.00 tokens" in pages.write(found, tmp_path / "out", title="t").page.read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_report_is_not_fooled_by_draws_that_are_not_from_q(tmp_path):
    times = {(f"p{i}", "chat"): (2.0, 1.0) for i in range(4)}
    for gamma, alpha in ((2, 0.9), (4, 0.6)):  # 10 of 16 tested tokens stay
        making.speed_run(tmp_path / str(gamma), making.alphas(making.passes(times), alpha), policy__gamma=gamma)
    found = runs.find([tmp_path])
    said = [line for line in pages.doubts(methods.from_runs(found)) if "alpha_z" in line]
    assert len(said) == 1 and said[0].startswith("gamma 2: alpha_z is -7.3, beyond 4: tokens are accepted less often")
    assert said[0] in html.unescape(pages.write(found, tmp_path / "out", title="t").page.read_text())


def test_the_command(tmp_path, capsys):
    forwards = [{"n": 1, "predicted_v": 1.0, "bound": "memory"}]
    making.write(tmp_path / "roofline", {"name": "r", "summary": {"forwards": forwards}})
    assert cli.main(["report", str(tmp_path / "roofline")]) == 0
    out = capsys.readouterr().out
    assert "verify_cost: v(n)" in out and "left out speedup_by_gamma: no run decoded" in out
    assert (tmp_path / "roofline" / "report" / "index.html").is_file()


DRAFTERS, GAMMAS, HEATS = ("prompt_lookup", "a_drafter_with_a_name"), (1, 2, 3, 5, 8), (0, 0.3, 0.7, 1)
FORTY = list(itertools.product(DRAFTERS, GAMMAS, HEATS))
UNION = [{"rows": n, "batch": 1, "passes": 9, "kept": 0.3, "union": 0.4, "guess": 0.5} for n in (1, 2)]


@pytest.fixture(scope="module")
def forty(tmp_path_factory):
    """Forty runs with all that figures are made of, a point of quality and a model file each; with their methods."""
    directory = tmp_path_factory.mktemp("forty")
    split = {"draft": 0.1, "verify": 0.7, "sample": 0.1, "commit": 0.1}
    for job, (drafter, gamma, heat) in enumerate(FORTY):
        faster = 1 + 0.1 * gamma - 0.2 * heat
        times = {key: (plain, plain / faster) for key, (plain, _) in TIMES.items()}
        quality = {"name": f"rule {job}", "model": {"kl": 0.01 * (job % 7), "perplexity": 9.0}}
        found = {
            "explanation": {"predicted": faster, "factors": [{"name": "acceptance", "value": 0.5, "text": ""}]},
            "text": UNION,
            "points": [{"value": 0.5, "quality": quality, "by_bytes": 2.0,
                        "speedup": {"ratio_of_totals": 1 + 0.01 * job, "low": 1.0, "high": 1.6}}],
        }  # fmt: skip
        done = making.passes(times, accepted=tuple(range(8, 8 - gamma, -1)))
        making.speed_run(
            directory / str(job), done, split=split, verifier="match", findings=found,
            policy__gamma=gamma, sampling__temperature=heat, drafter__name=drafter,
        )  # fmt: skip
        forwards = [{"n": n, "predicted_v": 1.0, "bound": "memory", "measured_v": 1.0, "spread": 0.1} for n in (1, 4)]
        manifest = {"model": {"file": f"model-{job}.gguf"}}
        making.write(directory / f"r{job}", {"name": "r", "summary": {"forwards": forwards}, "manifest": manifest})
    found = runs.find([directory])
    return found, methods.from_runs(found)


@pytest.fixture(scope="module")
def of_forty(forty):
    """Its figures."""
    drawn, missing = figures.make(*forty)
    # Their points are those of runs by themselves (test_sparsity.py, test_kinds.py).
    assert {m.name for m in missing} == {"sparsity", "by_context", "acceptance_by_text"}
    return {figure.name: figure for figure in drawn}


def test_legends_of_forty_runs_can_be_read(of_forty):
    """No more entries than colours, none of them twice, and no legend cut or over the axes."""
    legends = 0
    for figure in of_forty.values():
        canvas = figure.canvas()
        canvas.draw_without_rendering()
        (axes, *_), room = canvas.axes, canvas.bbox
        assert not any(a.get_legend() for a in canvas.axes)
        for legend in canvas.legends:
            legends += 1
            words, box = [text.get_text() for text in legend.get_texts()], legend.get_window_extent()
            assert len(set(words)) == len(words) <= MOST + 1, figure.name
            assert min(box.x0, box.y0) >= 0 and box.x1 <= room.x1, figure.name
            assert box.y1 <= axes.get_tightbbox().y0 + 1, figure.name
        names = [t.get_text() for a in canvas.axes for t in a.texts if t.get_text()]
        assert figure.name == "time_split" or len(names) <= 12, figure.name
    assert legends >= 8


def test_a_legend_takes_no_room_from_the_axes(of_forty):
    """Whatever the length of its names."""
    figure = of_forty["speedup_by_task"]
    heights = []
    for name in ("short", "long " * 40):
        canvas = replace(figure, rows=tuple({**r, "method": f"{name}{r['method']}"} for r in figure.rows)).canvas()
        canvas.draw_without_rendering()
        heights.append(canvas.axes[0].get_window_extent().height)
        assert canvas.legends[0].get_window_extent().x1 <= canvas.bbox.x1
    assert heights[1] > 0.95 * heights[0]


def test_forty_points_are_coloured_by_what_makes_the_most_groups(forty, of_forty):
    rows = rows_of(of_forty["predicted_and_measured"])
    assert len(rows) == 40 and {r["group"] for r in rows} == {f"gamma {g}" for g in GAMMAS}
    found = forty[1]
    assert methods.grouped(found[:8], 8) == [m.label for m in found[:8]]
    assert set(methods.grouped(found, 4)) == {f"T {t}" for t in HEATS}
    assert set(methods.grouped(found, 1)) == {"all"}


def test_what_is_left_out_is_slower(forty, of_forty):
    """Of forty methods sixteen have a bar of stages, and the caption says which."""
    split = of_forty["time_split"]
    shown = {row["method"] for row in split.rows}
    assert len(shown) == 16 and "The 16 fastest of 40 methods, by speed-up." in split.caption
    values = {m.label: m.speedup().value for m in forty[1]}
    assert min(values[name] for name in shown) >= max(v for name, v in values.items() if name not in shown) - 1e-9


def test_names_say_what_differs(forty):
    found = forty[1]
    assert [m.label for m in found] == [f"{d}, gamma {g}, T {t}" for d, g, t in FORTY]
    assert methods.constants(found) == ["verifier match"]


@pytest.fixture(scope="module")
def page_of_forty(forty, tmp_path_factory):
    """Its tables; the figures have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "make", lambda *_: ([], []))
        return pages.write(forty[0], tmp_path_factory.mktemp("page"), title="forty").page.read_text()


def test_the_page_says_once_what_all_runs_share(page_of_forty):
    text = page_of_forty
    same = "text: same as plain (80 tokens over 4 passes)"
    assert f"<dt>in every run</dt><dd>verifier match, 4 prompts, {same}</dd>" in text
    assert text.count("same as plain") == 1


def test_options_that_come_with_a_drafter_are_no_names(tmp_path):
    options = {"prompt_lookup": {"drafter__ngram_max": 3}, "suffix": {"drafter__longest": 64, "drafter__factor": 1.0}}
    for name, own in options.items():
        making.speed_run(tmp_path / name, making.passes(TIMES), drafter__name=name, **own)
    found = methods.from_runs(runs.find([tmp_path]))
    assert [m.label for m in found] == ["prompt_lookup", "suffix"]
    assert methods.constants(found) == ["verifier greedy", "gamma 2", "T 0"]


@pytest.mark.usefixtures("undrawn")
def test_a_cell_taken_over_is_one_run(tmp_path):
    """Measured once, in three folders; measured anew it is a second run, and the sweep is in every name."""
    old, new, newest, anew = (tmp_path / name for name in ("1", "2", "3", "4"))
    for job, gamma in enumerate((2, 4)):
        done = making.speed_run(old / str(job), making.passes(TIMES), policy__gamma=gamma)
        sweeps.Cell(f"key {gamma}", "made").mark(done, 2.0)
        for sweep in (new, newest):
            (sweep / str(job)).mkdir(parents=True)
            sweeps.reuse(done, sweep / str(job))
    found = runs.find([tmp_path])
    assert [(r.directory, r.also) for r in found] == [
        (old / n, (new / n, newest / n)) for n in ("0", "1")
    ]  # fmt: skip
    assert [m.label for m in methods.from_runs(found)] == ["gamma 2", "gamma 4"]
    text = pages.write(found, tmp_path / "out", title="once").page.read_text()
    assert "2 runs (4 more folders hold measurements that were taken over from them)" in text
    assert main_tables(text)[1].count("<tr>") == 3 and "2/0, 3/0" in text
    slower = making.speed_run(anew / "0", making.passes({CHAT: (2.0, 1.5)}), policy__gamma=2)
    sweeps.Cell("key 2", "made").mark(slower, 2.0)
    both = runs.find([tmp_path])
    assert [m.label for m in methods.from_runs(both)] == ["gamma 2, 1", "gamma 4, 1", "gamma 2, 4"]
    lines = {f.name: f for f in figures.make(both, methods.from_runs(both))[0]}["speedup_by_gamma"]
    assert {r["method"] for r in rows_of(lines)} == {"1"}


PASS = making.one("a", "t", PLAIN, 1.0).row() | {"counters": 3}
"""A row whose counters are none."""
TIMED = {"speculative": {"counters": {"times": {"draft": "x"}}}}
"""A task whose stage times are none."""


def main_tables(text):
    """The two tables that a reader meets without opening anything."""
    return re.findall(r"<table class=\"main\">.*?</table>", text, re.DOTALL)


def test_the_main_tables_fit_a_laptop(page_of_forty):
    """Eight narrow columns at most, text that may wrap, and no bar to scroll by."""
    text = page_of_forty
    outside = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert 'class="scroll"' not in outside and len(main_tables(text)) == 2 == outside.count("<table")
    first, second = main_tables(text)
    assert len(re.findall("<th", first)) == 6 and len(re.findall("<tr", first)) == 41
    assert len(re.findall("<th", second)) <= 7
    assert re.search(r"table\.main td\.text.*white-space: normal", text)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no finished run there"),
        ({"record.json": "{"}, "record.json: not JSON"),
        ({"record.json": "[]"}, r"record=\[\] must be a group of values"),
        ({"record.json": "[" * 100_000}, "record.json: not JSON"),
        ({"record.json": '{"summary": {}, "config": 3}'}, "record.json: .*: config=3 must be a group of values"),
        ({"record.json": '{"summary": {}, "manifest": {"command": -1}}'}, "manifest.command=-1 must be a list"),
        ({"record.json": '{"summary": {}, "config": {"policy": {"gamma": []}}}'}, r"config.policy.gamma=\[\] must be"),
        (
            {"record.json": '{"summary": {"conditions": {"other_load": "x"}}}'},
            "summary.conditions.other_load=x must be",
        ),
        ({"record.json": '{"summary": {}, "tasks": {"a": 3}}'}, "tasks.a=3 must be a group of values"),
        (
            {"record.json": json.dumps({"summary": {}, "tasks": {"a": TIMED}})},
            "speculative.counters.times.draft=x must",
        ),
        ({"record.json": '{"summary": {"identity": "x"}}'}, "summary.identity=x must be a group of values"),
        ({"record.json": '{"summary": {}}', "prompts.jsonl": json.dumps(PASS)}, "prompts.jsonl:1: .*: counters=3 must"),
        ({"record.json": json.dumps({"summary": {}}), "prompts.jsonl": "{}\n{"}, "prompts.jsonl:2: not JSON"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        runs.find([tmp_path])
    with pytest.raises(UserError, match="nowhere: no finished run there"):
        runs.find([tmp_path / "nowhere"])
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"a\.gguf: no finished run there"):
        runs.find([tmp_path / "a.gguf"])


def test_an_empty_folder_is_refused(capsys):
    assert cli.main(["report", ""]) == 2
    said = capsys.readouterr().err
    assert "a run's folder is empty" in said and said.count("\n") == 1


@pytest.mark.usefixtures("undrawn")
def test_stopped_runs_are_left_out_and_named(tmp_path, capsys):
    making.speed_run(tmp_path / "0", making.passes(TIMES))
    making.write(tmp_path / "1", {"name": "x", "state": record.STOPPED, "passes": 3, "summary": {}})
    assert cli.main(["report", str(tmp_path)]) == 0
    assert f"left out {tmp_path / '1'}: stopped after 3 passes\n" in capsys.readouterr().out
    assert [r.directory.name for r in runs.stopped([tmp_path])] == ["1"]
    with pytest.raises(UserError, match="1: stopped before it had a result"):
        runs.find([tmp_path / "1"])


def test_jobs_come_in_the_order_of_their_numbers(tmp_path):
    for job in (0, 2, 10):
        making.write(tmp_path / str(job), {"name": str(job), "summary": {}})
    assert [r.name for r in runs.find([tmp_path])] == ["0", "2", "10"]


@pytest.mark.usefixtures("undrawn")
def test_record_comparison_and_page_give_one_interval(tmp_path):
    """Six passes of three prompts: repeats are no further prompts, whoever says it."""
    seconds = {"a": (2.0, 1.0), "b": (2.0, 1.6), "c": (3.0, 1.2)}
    done = [
        making.one(prompt, "chat", side, took * (1 + repeat / 50), repeat=repeat)
        for prompt, sides in seconds.items()
        for repeat in range(2)
        for side, took in zip((PLAIN, SPECULATIVE), sides, strict=True)
    ]
    making.speed_run(tmp_path / "run", done)
    (method,) = methods.from_runs(runs.find([tmp_path / "run"]))
    found = method.run.summary["speedup"]
    assert tuple(found[k] for k in ("ratio_of_totals", "low", "high", "prompts")) == pytest.approx(method.speedup()[:4])
    assert (found["prompts"], found["pairs"], found["interval_of"]) == (3, 6, "ratio_of_totals")
    assert {f"speedup_{key}" for key in found if key not in ("prompts", "pairs", "interval_of")} <= set(
        method.run.record["definitions"]
    )
    named = [replace(p, side="lookup") if p.side == SPECULATIVE else p for p in done]
    entry = compare.entry("lookup", get_verifier("greedy"), named, named, 1, None)
    assert entry.groups["all"].speedup.interval == pytest.approx(method.speedup())
    ends, note = f"{found['low']:.2f}-{found['high']:.2f}", "rounds that drafted"
    comparison = compare.Comparison((entry,), ())
    for table in (compare.table(comparison), sweeps.table([dict(method.run.record)] * 2)):
        assert ends in terminal(table) and note in " ".join(terminal(table).split())
    assert any("over 9 passes" in line for line in compare.lines(comparison))  # 12 less 3 to stand beside
    page_text = pages.write(runs.find([tmp_path / "run"]), tmp_path / "page", title="t").page.read_text()
    assert ends.replace("-", " to ") in page_text and note in page_text and "180 tokens over 9 passes" in page_text


def test_one_pair_has_no_interval_anywhere(tmp_path):
    sides = [making.one("a", "chat", side, took) for side, took in ((PLAIN, 2.0), (SPECULATIVE, 1.0), (HOST, 3.0))]
    making.speed_run(tmp_path / "run", sides[:2])
    run = runs.read(tmp_path / "run")
    assert run.summary["speedup"]["low"] is None
    named = [sides[0], replace(sides[1], side="lookup")]
    entry = compare.entry("lookup", get_verifier("greedy"), named, named, 1, None)
    for table in (compare.table(compare.Comparison((entry,), ())), sweeps.table([dict(run.record)] * 2)):
        assert "2.00" in terminal(table) and "2.00-2.00" not in terminal(table)
    old = {**run.record, "summary": {**run.summary, "speedup": {"ratio_of_totals": 2.0, "low": 2.0, "high": 2.0,
                                                               "prompts": 1}}}  # fmt: skip
    assert "2.00-2.00" not in terminal(sweeps.table([old, old]))
    groups = record.groups(sides, bytes_per_pass=1, read_bandwidth=None)
    found = record.RunRecord("s", {}, groups, None, 0.0, None, 0.0, None, 1)
    nothing = SimpleNamespace(policies=())
    notes = speed.explain(found, sides, nothing, split={}, table=None, drafter="prompt_lookup").notes
    (note,) = [n for n in notes if "host loop" in n]
    assert "3.00 times" in note and "one prompt: no interval" in note


def terminal(table):
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()
