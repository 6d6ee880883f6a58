"""Stand-ins: an experiment whose models cannot be had runs on an embedded pair, and all that it writes says so."""

import contextlib
import copy
import dataclasses
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir

import specsparse
from specsparse import run
from specsparse.engine.config import ACTIVATION_KEY
from specsparse.errors import UserError
from specsparse.experiments import configured, runner, sparse_model, sweeps
from specsparse.experiments.kind import RunResult
from specsparse.experiments.settings import DecodingSettings, FfnSpec, ModelSettings, ModelSpec, from_omegaconf, of_kind
from specsparse.experiments.trackers.wandb import Wandb
from specsparse.measure.costs import acceptance
from specsparse.measure.costs.measuring import silent
from specsparse.models import catalogue
from specsparse.predictors.fit_mlp import save_predictors
from specsparse.report import pages, runs
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf
from tests.experiments.playing import quiet_context

DECLARED = (
    "spec_llama160m", "spec_llama160m_pq", "spec_tinyllama", "spec_qwen3", "spec_llama31_8b", "spec_smollm2_1.7b",
    "eagle3_llama31_8b", "powerinfer_relullama_7b",
)  # fmt: skip
ENTRY = {
    "what": "a tiny model", "good_for": "tests", "package": "stand_in_models", "file": "tiny.gguf",
    "install": "pip install tiny-models",
    "stand_ins": {"tiny": {"drafter": {"name": "prompt_lookup"}, "policy": {"name": "fixed", "gamma": 2}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model in a package, an entry of the catalogue for it, and no model of the Hub."""
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "stand_in_models").mkdir()
    write_tiny_gguf(folder / "stand_in_models" / "tiny.gguf", tokenizer="spm", vocab_size=300, n_layers=1)
    (folder / "own").mkdir()
    (folder / "own" / "tiny.yaml").write_text(yaml.safe_dump(ENTRY))
    (folder / "prompts.txt").write_text("abc abc abc abc")
    return folder


@pytest.fixture(autouse=True)
def _no_hub(place, monkeypatch):
    for name in ("SPECSPARSE_MODELS", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(place / "none"))
    monkeypatch.setenv("SPECSPARSE_CATALOGUE", str(place / "own"))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.syspath_prepend(place)
    monkeypatch.chdir(place)


QUICK = ("data.source=prompts.txt", "data.tasks=null", "max_tokens=3", "warmup=false", "time_split=0", "stream=false")
TINY = ("+experiment=spec_llama160m", "stand_in=tiny", "download=no", *QUICK)


def composed(*words):
    with initialize_config_dir(str(run.conf_dir()), version_base="1.3"):
        return dataclasses.replace(from_omegaconf(compose("config", list(words))), words=words)


def checked(*words):
    return runner.check(composed(*words)).cfg


def refused(capsys, *words):
    """The one line of a run that is refused and writes nothing."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        run.main(list(words))
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before
    return captured.err


@pytest.fixture(scope="module")
def ran(place, tmp_path_factory):
    """What a run of a stand-in printed, and its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECSPARSE_CATALOGUE", str(place / "own"))
        patch.setenv("SPECSPARSE_MODELS", str(place / "none"))
        patch.setenv("XDG_CACHE_HOME", str(place / "none"))
        patch.setenv("HF_HOME", str(place / "none"))
        patch.syspath_prepend(place)
        patch.chdir(place)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert run.main(list(TINY)) == 0
    (folder,) = (place / "runs").glob("*/*")
    return out.getvalue().strip().splitlines(), folder


def test_a_stand_in_is_named_first_and_last_in_the_record_and_by_its_folder(ran):
    lines, folder = ran
    assert lines[0] == lines[-1] and lines[0] == (
        "stand-in: model tiny, drafter prompt_lookup, policy fixed (gamma 2) in place of model llama-2-7b, drafter "
        "model (model llama-160m, special_tokens target), policy p_min (gamma 16, n_min 5, p_min 0.9); these figures "
        "are the stand-in's (download=no; stand_in=false takes none)"
    )
    record = json.loads((folder / "record.json").read_text())
    assert folder.parent.name == record["name"] == record["config"]["name"] == "spec_llama160m.stand_in"
    assert folder.name.endswith(".stand_in")
    assert record["stand_in"] == {
        "asked": {
            "model": "llama-2-7b",
            "drafter": {"name": "model", "model": "llama-160m", "special_tokens": "target"},
            "policy": {"name": "p_min", "gamma": 16, "n_min": 5, "p_min": 0.9},
        },
        "used": {
            "model": "tiny", "drafter": {"name": "prompt_lookup"}, "policy": {"name": "fixed", "gamma": 2},
        },
        "why": "download=no",
    }  # fmt: skip
    config = record["config"]
    assert (config["model"]["path"], config["drafter"]["name"], config["policy"]["name"]) == (
        "tiny", "prompt_lookup", "fixed",
    )  # fmt: skip
    assert (config["verifier"]["name"], config["sampling"]["temperature"], config["max_tokens"]) == ("match", 0.8, 3)
    assert record["method"]["drafter"] == "prompt_lookup" and record["manifest"]["model"]["file"] == "tiny.gguf"


def test_a_stand_in_is_named_by_report_and_wandb_and_teaches_no_table(ran, tmp_path, monkeypatch):
    lines, folder = ran
    found = runs.find([folder])
    page = pages.write(found, tmp_path, title=found[0].name).page.read_text().replace("&#39;", "'")
    assert lines[0] in page and "<title>spec_llama160m.stand_in</title>" in page
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    Wandb(mode="disabled").start(checked(*TINY), folder, None)
    sent = wandb.init.call_args.kwargs
    assert sent["name"].endswith(".stand_in") and sent["notes"] == lines[0] and "stand-in" in sent["tags"]
    assert sent["config"]["stand_in"]["asked"]["model"] == "llama-2-7b"
    with pytest.raises(UserError, match=r"record\.json: is of a stand-in"):
        acceptance.from_record(folder / "record.json")


def test_a_stand_ins_acceptance_is_measured_and_not_kept(monkeypatch):
    kept = []

    def measured(model, key, *_, keep, bar):
        kept.append(keep)
        return SimpleNamespace(acceptance={key: (0.5,)})

    monkeypatch.setattr(acceptance, "table_with_acceptance", measured)
    cfg = of_kind(checked(*TINY), DecodingSettings)
    assert configured.rates(cfg, None, None, [], silent) == (0.5,)
    configured.rates(dataclasses.replace(cfg, stood_in=None), None, None, [], silent)
    assert kept == [False, True]


def test_a_sweep_keeps_stand_in_and_pair_apart(ran, tmp_path):
    cfg = checked(*TINY)
    cell = sweeps.Cell.from_config(cfg)
    assert cell.name == "spec_llama160m"
    assert sweeps.Cell.from_config(dataclasses.replace(cfg, stood_in=None)).key != cell.key
    for number in ("0.stand_in", "1"):
        (tmp_path / number).mkdir()
        record = json.loads((ran[1] / "record.json").read_text())
        if number == "1":
            del record["stand_in"]
        (tmp_path / number / "record.json").write_text(json.dumps(record))
    setting, lines = sweeps.swept(found := sweeps.records(tmp_path))[-1], sweeps.stand_ins(found)[1]
    assert setting.name == "stand-in" and setting.values == ("tiny", "-") and lines == [ran[0][0]]


def test_a_sweep_says_once_what_its_stand_ins_have_in_common(ran):
    one = json.loads((ran[1] / "record.json").read_text())
    two = copy.deepcopy(one)
    for policy in (two["config"]["policy"], two["stand_in"]["asked"]["policy"], two["stand_in"]["used"]["policy"]):
        policy["gamma"] = 9
    swept, (line,) = sweeps.swept([one, two]), sweeps.stand_ins([one, two])[1]
    assert [(setting.name, setting.values) for setting in swept] == [("gamma", ("2", "9")), ("stand-in", ("tiny",) * 2)]
    assert "policy fixed in place of model llama-2-7b" in line and "policy p_min (n_min 5, p_min 0.9)" in line
    two["stand_in"]["asked"]["policy"]["p_min"] = 0.5
    words, lines = sweeps.stand_ins([one, two, one])
    assert words == ("1", "2", "1") and "p_min 0.9" in lines[0] and lines[1].startswith("stand-in 2: model tiny")


def test_a_stand_in_in_a_sweep_has_a_folder_of_its_name(place, monkeypatch, capsys):
    """Hydra's part of it; nothing is decoded. The models are asked for once, for the folder and all runs."""
    went, asked, obtain = [], [], catalogue.obtain
    monkeypatch.setattr(catalogue, "obtain", lambda *args: (asked.append(args), obtain(*args)))
    done = RunResult({}, None, objective=0.0)
    monkeypatch.setattr(run, "_run", lambda checked, directory: went.append((checked.cfg.name, directory)) or done)
    monkeypatch.setattr(sweeps.Sweep, "_ended", lambda *_: True)
    monkeypatch.setattr(sweeps, "show", lambda *_: None)
    monkeypatch.setattr(sweeps, "records", lambda directory: [directory])
    assert run.main(["-m", *TINY, "policy.gamma=9,10"]) == 0
    (first, zero), (second, one) = went
    assert first == second == zero.parents[1].name == "spec_llama160m.stand_in"
    assert (zero.name, one.name) == ("0.stand_in", "1.stand_in") and zero.is_dir()
    assert zero.parent == one.parent and zero.parent.name.endswith(".stand_in")
    lines = capsys.readouterr().out.splitlines()
    assert len(asked) == 1 and len(lines) == 2
    assert "policy fixed (gamma 9)" in lines[0] and "policy fixed (gamma 10)" in lines[1]


def test_the_error_of_before_without_a_stand_in(capsys):
    pair = ("+experiment=spec_llama160m", "download=no")
    line = refused(capsys, *pair, "stand_in=false")
    assert line.startswith("specsparse: llama-2-7b.Q4_0.gguf (3.8 GB,") and "drafter.model=/path/to/llama-160m" in line
    cfg = composed(*pair)
    for word in ("drafter.model=llama-68m", "model=tinyllama-1.1b", "drafter=prompt_lookup", "model.path=none.gguf"):
        with pytest.raises(catalogue.NotHere):
            runner.check(dataclasses.replace(cfg, words=(word,)))
    with pytest.raises(UserError, match="give stand_in=lookup_head or model or tiny"):
        runner.check(dataclasses.replace(cfg, stand_in="predictors"))
    with pytest.raises(UserError, match="stand_in=smollm2 must be false, lookup_head, model, predictors or tiny"):
        composed(*pair, "stand_in=smollm2")


def test_a_stand_in_that_cannot_be_loaded_is_one_line(capsys, place, monkeypatch):
    file, other = place / "stand_in_models" / "tiny.gguf", place / "elsewhere.gguf"
    file.rename(other)
    try:
        line = refused(capsys, *TINY)
        assert "llama-2-7b" in line and "stand_in=tiny cannot run either" in line and "pip install tiny" in line
        file.write_bytes(b"GGUF")
        assert "stand_in=tiny cannot run either" in refused(capsys, *TINY)
    finally:
        other.replace(file)


@pytest.mark.parametrize(
    "why", ["huggingface.co/a/b asks for consent and a token: accept its terms there", "not downloaded"]
)
def test_a_stand_in_runs_where_consent_is_missing(monkeypatch, why):
    """That of a gated repository, and that of a reader whom a terminal asked."""

    def obtain(wanted, download):
        raise catalogue.NotHere(wanted, why) if why == "not downloaded" else UserError(why)

    monkeypatch.setattr(catalogue, "obtain", obtain)
    assert checked(*TINY).stood_in.why == why


def test_a_stand_in_keeps_what_the_command_line_says_of_the_policy():
    assert checked(*TINY, "policy.gamma=12").policy.options["gamma"] == 12
    own = checked("+experiment=spec_tinyllama", *TINY[1:], "policy=heuristic")
    assert own.policy.name == "heuristic" and own.drafter.name == "prompt_lookup"


@pytest.fixture
def _relu(monkeypatch, place):
    """In place of the stand-in with predictors, which takes 100 MB to make."""
    relu, locate = write_tiny_gguf(place / "relu.gguf", metadata={ACTIVATION_KEY: "relu"}), catalogue.locate
    monkeypatch.setattr(catalogue, "locate", lambda entry, **how: relu if entry.base else locate(entry, **how))


@pytest.mark.usefixtures("_relu")
def test_a_stand_in_keeps_the_ffn_and_the_predictor_that_the_command_line_names():
    power = ("+experiment=powerinfer_relullama_7b", "download=no")
    for word in ("predictor=svd", "predictor=signbit"):
        used = checked(*power, word, "sparsity.values=[]")
        assert (used.ffn.name, used.predictor.name) == ("predicted", word.removeprefix("predictor="))
        assert used.stood_in.used.keys() == {"model", "ffn"}
    assert checked(*power, "+ffn.tokens=64").ffn.tokens == 64
    own = checked(*power, "ffn=oracle", "kind=speed", "~sparsity")
    assert (own.ffn.name, own.predictor.name, own.model.path) == ("oracle", "none", "smollm2-135m-relu")
    for word, says in (
        ("ffn=powerinfer", "ffn=powerinfer needs"), ("ffn=oracle", "cannot run either: kind=sparsity judges"),
        ("ffn.threshold=0.2", "cannot run either: ffn.faithful_f16 and ffn.threshold"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            checked(*power, word)


@pytest.mark.usefixtures("_relu")
def test_the_experiments_that_declare_a_stand_in():
    """Each has the shipped one, with its own verifier, sampling and prompts; the others have none."""
    files = sorted(file.stem for file in (run.conf_dir() / "experiment").glob("*.yaml"))
    text = {name: (run.conf_dir() / "experiment" / f"{name}.yaml").read_text() for name in files}
    declaring = [name for name in files if "\nstand_in:" in text[name] or "\n  - spec_llama160m\n" in text[name]]
    assert declaring == sorted(DECLARED)
    for name in DECLARED:
        asked = composed(f"+experiment={name}", "download=no")
        for stand_in in ["predictors"] if "power" in name else ["lookup_head", "model"]:
            used = runner.check(dataclasses.replace(asked, stand_in=stand_in)).cfg
            assert (used.verifier, used.sampling, used.data) == (asked.verifier, asked.sampling, asked.data)
            assert used.name == f"{name}.stand_in" and used.max_tokens == asked.max_tokens
            if stand_in == "predictors":
                parts = used.model.path, used.ffn.name, used.predictor.name
                assert parts == ("smollm2-135m-relu", "predicted", "mlp")
            else:
                parts = used.model.path, used.drafter.name, used.policy.name, used.policy.options["gamma"]
                assert parts == ("smollm2-135m", stand_in, "auto_off", 4)


@pytest.mark.parametrize(("options", "threshold"), [({}, 0.25), ({"threshold": 0.5}, 0.5)])
def test_a_stand_ins_predictors_take_the_experiments_threshold(tmp_path, options, threshold):
    """In place of the one in their file."""
    model = specsparse.load(write_tiny_gguf(tmp_path / "relu.gguf", n_layers=1, metadata={ACTIVATION_KEY: "relu"}))
    shapes = ((4, model.config.d_model), (model.config.d_ff, 4))
    pairs, file = [tuple(np.ones(shape, np.float32) for shape in shapes)], tmp_path / "p.safetensors"
    save_predictors(file, pairs, threshold=0.25)
    cfg = ModelSettings(
        model=ModelSpec(str(model.path)), ffn=FfnSpec("predicted", weights=str(file)), predictor=Choice("mlp", options)
    )
    (weights,) = sparse_model.sparse_of(cfg, quiet_context(), model).weights
    assert float(weights.threshold) == threshold
