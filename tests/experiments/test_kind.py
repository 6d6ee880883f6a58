"""A kind of experiment of one's own, and what the runner makes of what it found."""

import pytest

from specsparse.errors import UserError
from specsparse.experiments.kind import KINDS, Kind
from specsparse.experiments.kinds.quality import PerplexitySettings
from specsparse.experiments.settings import DataSpec, DecodingSettings, ModelSettings
from specsparse.support.registry import Choice
from tests.experiments.playing import play, replaced, run_config

MINE = '''
from specsparse.errors import UserError
from specsparse.experiments.kind import RunResult, Kind
from specsparse.report.plots import Figure, Rows


class Dice(Kind):
    """Counts of a die."""

    takes_model = False

    def check(self, cfg):
        if cfg.seed == 6:
            raise UserError("seed=6 is no seed for dice")

    def run(self, cfg, ctx):
        ctx.tracker.log({"thrown": 1})
        rows = ({"face": 1, "count": 3}, {"face": 2, "count": 5})
        bars = Figure("faces", "faces", "", rows, lambda canvas, rows: canvas.subplots().bar(1, rows[0]["count"]))
        return RunResult({"mean": 3.5}, shown=["a mean of 3.5"], figures=[bars, Rows("raw", rows)],
                     definitions={"mean": "m"}, more={"throws": 8}, as_promised=False, objective=3.5)


class NoKind:
    pass
'''


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    (tmp_path / "dice_kind.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return run_config("none.gguf", kind="dice_kind:Dice", composed={"name": "test"})


def test_a_kind_of_ones_own_runs_and_is_written_down_by_the_runner(cfg, tmp_path):
    found, text, written = play(cfg, tmp_path / "run", width=40)
    assert not found.as_promised and found.objective == 3.5
    assert list(written) == ["name", "kind", "summary", "throws", "definitions", "manifest", "config"]
    assert written["kind"] == "dice_kind:Dice" and written["manifest"]["model"] is None
    files = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert files == ["faces.csv", "faces.png", "prompts.jsonl", "raw.csv", "record.json"]
    assert (tmp_path / "run" / "raw.csv").read_text() == "face,count\n1,3\n2,5\n"
    first, last = text.splitlines()
    assert first == "a mean of 3.5"
    assert last == f"record: {tmp_path / 'run' / 'record.json'}, faces.csv, faces.png, raw.csv"  # whole, however long


class Bracketed(Kind[PerplexitySettings]):
    timed = False


class Derived(Bracketed):
    pass


class Said(Kind[PerplexitySettings]):
    settings = ModelSettings


class Bare(Kind):
    pass


def test_settings_of_a_kind_are_those_in_its_brackets_unless_it_says_others():
    asked = [kind.settings for kind in (Bracketed, Derived, Said, Bare)]
    assert asked == [PerplexitySettings, PerplexitySettings, ModelSettings, DecodingSettings]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 6}, "seed=6 is no seed for dice"),
        ({"kind": "dice_kind:NoKind"}, "kind=dice_kind:NoKind is no Kind: derive it from"),
        ({"kind": "no_such_module:Dice"}, "there is no module no_such_module"),
        ({"name": "a/b"}, "name=a/b: a plain name is needed"),
        ({"tracker": Choice("w")}, "tracker=w is unknown"),
        ({"data": DataSpec(lengths=(8,))}, r"kind=dice_kind:Dice takes no data\.lengths"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(cfg, tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        play(replaced(cfg, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_kind_of_its_name_is_one():
    found = {name: KINDS.find(name) for name in KINDS.names()}
    assert len(found) >= 13 and all(kind.__doc__ for kind in found.values())
    untimed = {name for name, kind in found.items() if not kind.timed}
    trainings = {"relufy", "train_drafter", "train_experts", "train_predictors"}
    assert untimed == {"certify", "perplexity", "powerinfer_oracle"} | trainings
    assert {name for name, kind in found.items() if kind.on_mesh} == {"speed", "compare", "perplexity"}
    by_length = {name for name, kind in found.items() if kind.takes_lengths}
    assert by_length == {"speed", "compare", "spec_sparse", "experts_union"}
    dense = {name for name, kind in found.items() if not kind.takes_ffn}
    assert dense == {"certify", "experts_union", "quant_table", "roofline"} | trainings
