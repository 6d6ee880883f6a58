"""From the command line to a RunConfig: golden composition, and one clear line for every mistake."""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specsparse import run
from specsparse.engine.config import ACTIVATION_KEY
from specsparse.errors import UserError
from specsparse.experiments import command_line, runner, settings
from specsparse.experiments.kinds.compare import CompareSettings, pairs
from specsparse.experiments.settings import RunConfig
from specsparse.models import catalogue
from specsparse.runtime.method import resolve
from specsparse.speculative.base import DraftKind
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.policies import get_policy
from specsparse.testing import write_tiny_gguf
from tests.cells import cells
from tests.experiments import playing
from tests.other_process import imported

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"


def composed(*overrides):
    with initialize_config_dir(str(run.conf_dir()), version_base="1.3"):
        return compose("config", command_line.shorthand(list(overrides)))


@functools.cache
def experiment(name):
    """As its file has it, composed once."""
    return settings.from_omegaconf(composed(f"+experiment={name}"))


def mistake(capsys, *argv):
    """The one line that a mistaken command line gets."""
    try:
        code = run.main(list(argv))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("specsparse: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs write under the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # run.main sets it; undone after the test
    return tmp_path


@pytest.mark.parametrize("name", sorted(p.stem for p in (run.conf_dir() / "experiment").glob("*.yaml")))
def test_composed_experiments_are_golden(name):
    """A change of a config shows in review; UPDATE_GOLDEN=1 rewrites the text."""
    cfg = experiment(name)
    text = OmegaConf.to_yaml(OmegaConf.create(cfg.composed))
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(text)
    assert text == file.read_text()


def test_newcomer_runs_every_experiment_as_the_docs_list_it(monkeypatch, tmp_path):
    """No run is refused but for a model that is to be downloaded, or a file that is the reader's own."""
    table = (ROOT / "docs" / "usage.md").read_text().partition("## Experiments")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|.*\|$", table, re.M)
    listed = [command.split() for row in rows for command in re.findall("`([a-z]\\w*.*?)`", row)]
    relu = write_tiny_gguf(tmp_path / "relu.gguf", metadata={ACTIVATION_KEY: "relu"})
    locate = catalogue.locate  # the model itself is 100 MB to make
    monkeypatch.setattr(catalogue, "locate", lambda entry, **how: relu if entry.base else locate(entry, **how))
    for name, *given in listed:
        if given:
            assert any("FILE" in word for word in given)
            continue
        with contextlib.suppress(catalogue.NotHere):
            runner.check(dataclasses.replace(experiment(name), download="no"))


def test_newcomer_hears_before_anything_is_loaded_that_a_model_has_no_zeros():
    for name in ("placement", "train_predictors"):
        cfg = experiment(name)
        silu = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path="smollm2-135m"))
        with pytest.raises(UserError, match="with SiLU no neuron is ever zero"):
            runner.check(silu)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["+experiment=train_drafter", "train.form=medusa"], "train.form=medusa must be one of head"),
        (["policy.gamma=1,2"], "policy.gamma=1,2: several values are a sweep"),
        (["policy.gamma=["], "cannot read 'policy.gamma=['"),
    ],
)
def test_newcomer_reads_the_key_that_was_wrong_as_it_was_written(capsys, argv, says):
    assert mistake(capsys, *argv).startswith(f"specsparse: {says}")


@pytest.mark.parametrize("name", sorted(p.stem for p in (run.conf_dir() / "experiment").glob("sweep_*.yaml")))
def test_every_value_of_a_sweep_composes(name):
    """One of each key at a time; what is no choice of a file is put into one composed config."""
    swept = OmegaConf.load(run.conf_dir() / "experiment" / f"{name}.yaml").hydra.sweeper.params

    @functools.cache
    def chosen(*choices):
        with initialize_config_dir(str(run.conf_dir()), version_base="1.3"):  # the sweeper spells nothing out
            return compose("config", [f"+experiment={name}", *choices])

    lists = (re.findall(r"\[.*?\]|[^,\s]+", str(values)) for values in swept.values())
    for cell in itertools.zip_longest(*lists):
        given = {key: value for key, value in zip(swept, cell, strict=True) if value is not None}
        groups = {key for key in given if (run.conf_dir() / key).is_dir()}
        cfg = chosen(*(f"{key}={value}" for key, value in given.items() if key in groups)).copy()
        for key in given.keys() - groups:
            OmegaConf.update(cfg, key, yaml.safe_load(given[key]))
        playing.settings(settings.from_omegaconf(cfg))


@pytest.mark.parametrize("name", sorted(p.stem for p in (run.conf_dir() / "experiment").glob("*.yaml")))
def test_experiments_open_with_claim_numbers_time_and_command(name):
    head = (run.conf_dir() / "experiment" / f"{name}.yaml").read_text().split("defaults:")[0]
    for word in ("# Claim:", "# Expected:", "# Time:", f"# Command:  python -m specsparse.run +experiment={name}"):
        assert word in head


CHOICES: dict[str, list[str]] = {}
for file in sorted(run.conf_dir().glob("*/*.yaml")):
    if file.parent.name != "experiment":
        CHOICES.setdefault(file.parent.name, []).append(f"{file.parent.name}={file.stem}")

PLUGINS = {
    "sweep=joblib": "hydra_plugins.hydra_joblib_launcher",
    "sweep=local_jobs": "hydra_plugins.hydra_submitit_launcher",
    "sweep=optuna": "hydra_plugins.hydra_optuna_sweeper",
    "sweep=ray": "hydra_plugins.hydra_ray_launcher",
    "sweep=slurm": "hydra_plugins.hydra_submitit_launcher",
}


SWEEPS = [(choice,) for choice in CHOICES.pop("sweep")]


@pytest.mark.parametrize("choices", [*itertools.zip_longest(*CHOICES.values()), *SWEEPS], ids=lambda each: each[-1])
def test_every_choice_of_every_group_is_valid(choices):
    """One of each group at a time; what a run refuses to combine is no mistake of a file."""
    choices = [choice for choice in choices if choice]
    for plugin in filter(None, map(PLUGINS.get, choices)):
        pytest.importorskip(plugin, reason="needs specsparse[sweep]")
    needed = {
        "model=custom": ["model.path=x.gguf"], "drafter=model": ["drafter.model=x.gguf"],
        **{f"drafter={name}": ["drafter.path=x"] for name in ("eagle3", "dflash", "dspark")},
    }
    more = [override for choice in choices for override in needed.get(choice, [])]
    assert isinstance(settings.from_omegaconf(composed(*choices, *more)), RunConfig)


# Each goes the same way, from one list to one choice.
@pytest.mark.parametrize("name", cells(catalogue.names(), catalogue.names()[::5]))
def test_every_name_of_the_catalogue_is_a_choice(name):
    cfg = settings.from_omegaconf(composed(f"model={name}", "model.context_length=64"))
    assert cfg.model.path == catalogue.find(name).name and cfg.model.overrides() == {"context_length": 64}


@pytest.mark.parametrize(("given", "means"), [("yes", "yes"), ("no", "no"), ("true", "yes"), ("false", "no")])
def test_a_bare_yes_of_yaml_is_one_too(given, means):
    assert settings.from_omegaconf(composed(f"download={given}")).download == means


DRAFTER_FILES = sorted(f.stem for f in (run.conf_dir() / "drafter").glob("*.yaml") if f.stem != "none")


EXPERIMENTS = ["spec_smollm2", "sweep_gamma", "sweep_temperature", "compare"]
TAKEN = list(itertools.product(EXPERIMENTS, DRAFTER_FILES))


# Every drafter by one experiment; an option of another drafter's shows under two drafters already.
@pytest.mark.parametrize(
    ("experiment", "drafter"), cells(TAKEN, [t for t in TAKEN if t[0] == EXPERIMENTS[0] or t[1] in ("head", "suffix")])
)
def test_an_experiment_takes_another_drafter(experiment, drafter):
    """No experiment sets an option that only its own drafter has."""
    cfg = composed(f"+experiment={experiment}", f"drafter={drafter}", "model.path=x.gguf")
    options = OmegaConf.to_container(cfg.drafter)
    needed = {"model": {"model": "x.gguf"}} | {name: {"path": "x"} for name in ("eagle3", "dflash", "dspark")}
    get_drafter(options.pop("name"), **options | needed.get(drafter, {}))


def test_a_value_that_is_needed_may_have_another_projects_name():
    options = settings.from_omegaconf(
        composed("drafter=model", "drafter.path=y.gguf", "model.path=x.gguf")
    ).drafter.options
    assert options["model"] == "y.gguf" and "path" not in options


def test_values_arrive():
    cfg = settings.from_omegaconf(
        composed("policy.gamma=3", "model.rope_base=10000", "data.tasks=[code]", "sampling.top_p=0.9", "tracker=wandb")
    )
    assert (cfg.policy.name, cfg.gamma) == ("auto_off", 3)
    assert cfg.model.overrides() == {"rope_base": 10000.0}
    assert cfg.data.tasks == ("code",)
    assert cfg.tracker.options.keys() > {"mode", "project", "group"} and not cfg.tracker.options["mode"]
    assert cfg.drafter.options == {"ngram_max": 3, "ngram_min": 2}
    params = cfg.params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.9, cfg.max_tokens)
    assert cfg.composed["policy"]["gamma"] == 3 and "composed" not in cfg.composed
    assert [settings.from_omegaconf(composed(f"repeats={n}")).repeats for n in (7, "auto")] == [7, "auto"]


MISTAKES = [
    ("max_tokens=0", "max_tokens=0 must be a whole number of at least 1"),
    ("max_tokens=many", "max_tokens=many must be a whole number"),
    ("max_tokens=1.5", "max_tokens=1.5 must be a whole number"),
    ("max_tokens=true", "max_tokens=True must be a whole number"),
    ("repeats=0", "repeats=0 must be a whole number of at least 1"),
    ("repeats=often", "repeats=often must be a whole number of at least 1 or auto"),
    ("repeats=true", "repeats=True must be a whole number of at least 1 or auto"),
    ("repeats=null", "repeats=null must be a whole number of at least 1 or auto"),
    ("seed=null", "seed=null must be a whole number"),
    ("warmup=3", "warmup=3 must be true or false"),
    ("policy.gamma=0", "policy.gamma=0 must be a whole number of at least 1"),
    ("model.kv_dtype=f8", "model.kv_dtype=f8 must be one of f32, f16, bf16, q8_0"),
    ("data.tasks=3", "data.tasks=3 must be a list"),
    ("data=3", "data=3: there is no such data"),
    ("sampling.temperature=-1", "temperature"),
    ("sampling.top_p=2", "top_p=2 must be a number above 0 and at most 1"),
    ("model.mesh=0", "model.mesh=0 must be a whole number of at least 1"),
    ("model.mesh=two", "model.mesh=two must be a whole number"),
    ("++ffn.union_cap=0.0", "ffn.union_cap=0.0 must be a number above 0 and at most 1"),
    (
        "+experiment=placement ++placement.active_share=2.0",
        "placement.active_share=2.0 must be a number above 0 and at most 1",
    ),
    ("+experiment=placement placement.link_gbs=0.0", "placement.link_gbs=0.0 must be a number above 0"),
    (
        "+experiment=train_predictors ++train.active_share=1.0",
        "train.active_share=1.0 must be a number above 0 and below 1",
    ),
    ("drafter=prompt_lokup", "did you mean prompt_lookup?"),
    ("+experiment=spec_smolm2", "did you mean spec_smollm2?"),
    ("policy.gama=3", "policy.gama is no option of auto_off; did you mean gamma?"),
    ("drafter.ngram_mx=3", "drafter.ngram_mx is no option of prompt_lookup; did you mean ngram_max?"),
    ("sampling.temprature=1", "did you mean sampling.temperature?"),
    ("sampling.n=2", "write +sampling.n=VALUE"),
    ("drafer=none", "did you mean drafter?"),
    ("limit=1", "no key limit; did you mean data.limit_per_task?\n"),
    ("data.limt=1", "no key data.limt; did you mean data.limit_per_task?"),
    ("gamma=3", "no key gamma; did you mean policy.gamma, certify.gamma or train.gamma?"),
    ("num_beams=3", "no key num_beams; there is no beam search; best_of keeps"),
    ("sampling.gamma=3", "no key sampling.gamma; did you mean train.gamma or policy.gamma?"),
    ("model.zzz=1", "no key model.zzz; valid: model.activation, model.backend, "),
    ("train.zzz=1", "no key train.zzz and none like it; groups: certify, compare, data, "),
    ("zzz=1", ", verifier; all keys of a config: +experiment=NAME --help\n"),
    ("+max_token=3", "max_token is no option of kind=speed; did you mean max_tokens?"),
    ("+sampling.top=3", "unknown sampling parameter 'top'"),
    ("++roofline.device=a100", "roofline is no option of kind=speed"),
    ("+experiment=roofline ++roofline.devic=a100", "roofline.devic is no option; did you mean device?"),
    ("+experiment=roofline roofline.devic=a100", "no key roofline.devic; did you mean roofline.device?"),
    ("+max_tokens=3", "max_tokens"),
    ("name=${foo}", "Interpolation key 'foo' not found"),
    ("name=a/b", "name=a/b: a plain name"),
    ("a=[", "cannot read 'a=['"),
    ("model=custom", "model.path: a value is needed"),
    ("model=missing.gguf", "missing.gguf: no such file"),
    ("model.path=smollm3", "did you mean smollm2"),
    ("model=llama-3-8b", "model=llama-3-8b: there is no such model; did you mean llama-3.1-8b?"),
    ("download=perhaps", "download=perhaps must be yes, no or ask"),
    ("data=missing.jsonl", "prompts missing.jsonl: cannot be read"),
    ("data.tasks=[poetry]", "no prompts of task 'poetry'"),
    ("+tracker.mod=x", "tracker.mod is no option"),
    ("--modle", "unrecognized arguments: --modle"),
]
# The same check of the same types at other keys; tests/support has each type's mistakes.
ALIKE = (
    "max_tokens=1.5",
    "max_tokens=true",
    "repeats=0",
    "repeats=true",
    "repeats=null",
    "seed=null",
    "warmup=3",
    "policy.gamma=0",
    "model.mesh=0",
    "model.mesh=two",
    "++ffn.union_cap=0.0",
)


@pytest.mark.parametrize(("override", "message"), cells(MISTAKES, [m for m in MISTAKES if m[0] not in ALIKE]))
def test_a_mistake_is_one_line_and_leaves_nothing(capsys, elsewhere, monkeypatch, override, message):
    if not override.startswith(("model", "data")):  # those are looked for; the others must not need the model
        monkeypatch.setattr("specsparse.models.catalogue.resolve", lambda spec: elsewhere)
    assert message in mistake(capsys, *override.split())
    assert not any(elsewhere.iterdir())


def test_mistakes_that_no_part_is_asked_about_are_answered_at_once(elsewhere):
    """What takes half a second is the import of jax; nothing that is slow comes in unless the answer needs it."""
    nothing = [["+experiment=spec_smolm2"], ["drafter=prompt_lokup"], ["zzz"]]
    numpy = [["max_tokens=0"], ["limit=1"], [f"seed={2**65}"], ["+experiment=roofline", "roofline.devic=a100"]]
    answers = imported(*(["run", *argv] for argv in nothing + numpy))
    for argv, (packages, _) in zip(nothing + numpy, answers, strict=True):
        assert packages == ([] if argv in nothing else ["numpy"]), argv


MISTYPED = [
    (["verifier.xyz=1"], "verifier.xyz is no option of greedy; valid: none"),
    (
        ["drafter=head", "drafter.temprature=1"],
        "drafter.temprature is no option of head; did you mean temperature?",
    ),
    (
        ["drafter=suffix", "drafter.longest=0"],
        "drafter.longest=0 must be a whole number of at least 1 and at most 4096",
    ),
    (["drafter.gamma=3"], "write policy.gamma instead of drafter.gamma"),
    (
        ["drafter=suffix", "drafter.num_speculative_tokens=abc"],
        "write policy.gamma instead of drafter.num_speculative_tokens",
    ),
    (["drafter.max_nodes=3"], "write policy.gamma instead of drafter.max_nodes"),
    (["drafter=none", "drafter.gamma=3"], "drafter.gamma is no option of drafter=none"),
    (["verifier=typical", "verifier.epsilo=1"], "verifier.epsilo is no option of typical; did you mean epsilon?"),
    (["tree.widht=3"], "tree.widht is no option of tree=chain"),
    (["tree=static", "tree.widht=3"], "tree.widht is no option of static; did you mean widths?"),
    ([f"seed={2**65}"], f"seed={2**65} must be a whole number of at least 0 and at most {2**64 - 1}"),
    (["policy=auto_off", "policy.evry=3"], "policy.evry is no option of auto_off; did you mean every?"),
    (["verifier=threshold", "verifier.total=2"], "verifier.total=2 must be a number above 0 and at most 1"),
]


@pytest.mark.parametrize(("argv", "line"), MISTYPED)
def test_a_mistyped_option_is_one_line(capsys, elsewhere, argv, line):
    assert mistake(capsys, "+experiment=spec_smollm2", *argv) == f"specsparse: {line}\n"
    assert not any(elsewhere.iterdir())


def test_an_invalid_combination_of_a_sweep_is_left_out(capsys, elsewhere, monkeypatch):
    """The others run; where none can, the exit code says so."""
    from specsparse.experiments import runner as experiment

    done = []

    class Done:
        as_promised, objective = True, 1.0

    def run_it(cfg, directory, **_):
        experiment.check(cfg)
        done.append(cfg.verifier.name)
        (directory / "record.json").write_text("{}")
        return Done

    monkeypatch.setattr(experiment, "run", run_it)
    monkeypatch.setattr("specsparse.models.catalogue.resolve", lambda spec: elsewhere)
    assert run.main(["-m", "verifier=greedy,token,delta"]) == 0
    assert done == ["greedy", "delta"]
    left_out = capsys.readouterr().err.splitlines()
    assert len(left_out) == 1 and "left out verifier=token: verifier=token cannot verify one_hot chain" in left_out[0]
    assert "drafter=prompt_lookup" in left_out[0]
    with pytest.raises(SystemExit) as stop:
        run.main(["-m", "verifier=token,wor", "name=second"])  # a folder is named by the second
    assert stop.value.code == 2 and len(done) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_debug_shows_the_traceback(elsewhere):
    with pytest.raises(UserError, match="max_tokens"):
        run.main(["max_tokens=0", "debug=true"])


def test_short_forms():
    assert run.shorthand(["model=~/a b.gguf"])[0] == "model=custom"
    assert run.shorthand(["model=hf://o/r/f.gguf"]) == ["model=custom", "model.path=hf://o/r/f.gguf"]
    assert run.shorthand(["model=/x/it's.gguf"])[1] == r"model.path='/x/it\'s.gguf'"
    assert run.shorthand(["model=llama-2-7b"]) == ["model=llama-2-7b"]
    assert run.shorthand(["data=mine.txt", "model=smollm2"]) == ["data.source=mine.txt", "model=smollm2"]
    other = run.shorthand(["+experiment=spec_smollm2", "data=humaneval", "data.limit_per_task=2"])
    assert other[1:] == ["data=humaneval", "data.tasks=null", "data.limit_per_task=2"]
    for same in (["data=builtin"], ["data=spec_bench", "data.tasks=[rag]"], ["data.limit_per_task=1"]):
        assert run.shorthand(["+experiment=spec_smollm2", *same]) == ["+experiment=spec_smollm2", *same]
    assert run.shorthand(["experiment=a", "+experiment=a", "-m"]) == ["+experiment=a", "+experiment=a", "-m"]
    lists = ["+experiment=context", "drafter=ngram,suffix", "verifier=greedy,delta"]
    assert run.shorthand(lists)[1:] == ["compare.drafters=[prompt_lookup,suffix]", "compare.verifiers=[greedy,delta]"]
    assert run.shorthand([*lists, "-m"])[1] == "drafter=prompt_lookup,suffix"


@pytest.mark.parametrize("group", command_line.PARTS)
def test_files_say_the_name_and_what_differs(group):
    """One default for the API and YAML: that of the class."""
    for file in (run.conf_dir() / group).glob("*.yaml"):
        given = OmegaConf.to_container(OmegaConf.load(file))
        defaults = command_line.completed(group, {"name": given.pop("name")})
        assert len(file.read_text().splitlines()) <= 5
        assert all(defaults[key] != value for key, value in given.items()), file
    names = {*command_line.PARTS[group].names(), command_line.NOTHING.get(group)}
    assert {f.stem for f in (run.conf_dir() / group).glob("*.yaml")} <= names


def test_aliases_are_spelled_out():
    for group, registry in command_line.PARTS.items():
        for alias, name in registry.aliases.items():
            assert run.shorthand([f"{group}={alias}"]) == [f"{group}={name}"]


@pytest.mark.parametrize("group", command_line.PARTS)
def test_an_option_has_the_same_value_under_every_name(group):
    for name in command_line.PARTS[group].names():
        defaults = command_line.completed(group, {"name": name})
        for option in command_line.described(group, name):
            for alias in option.aliases:
                given = {"name": name, option.name: None, alias: defaults[option.name]}  # the later one counts
                assert command_line.completed(group, given) == defaults


def test_names_of_other_projects_arrive():
    given = [
        "policy=n_min",
        "policy.draft_max=16",
        "policy.draft_min=5",
        "drafter=ngram",
        "drafter.prompt_lookup_max=4",
    ]
    cfg = settings.from_omegaconf(composed(*run.shorthand(given)))
    assert (cfg.gamma, cfg.policy.options["n_min"], cfg.drafter.name) == (16, 5, "prompt_lookup")
    assert cfg.drafter.options["ngram_max"] == 4


@pytest.mark.parametrize("head", ["head", "lookup_head"])
def test_a_head_draws_for_the_verifiers_that_weigh_draws(head):
    def drawn_at(*overrides):
        run = settings.from_omegaconf(composed(f"drafter={head}", "sampling.temperature=0.8", *overrides))
        return run.drafter.options["temperature"]

    for verifier in ("block", "token"):
        assert drawn_at(f"verifier={verifier}") == pytest.approx(0.6)
    assert drawn_at("verifier=match") is None
    assert drawn_at("verifier=block", "drafter.temperature=0.5") == 0.5


def test_compare_has_a_head_under_verifiers_that_weigh_draws():
    given = ("compare.drafters=[head]", "compare.verifiers=[token,match]", "sampling.temperature=0.8")
    run = settings.from_omegaconf(composed("+experiment=compare", *given))
    sides, refused = pairs(settings.of_kind(run, CompareSettings))
    kinds = [(name, resolve(pair.spec).drafter.kind) for name, pair in sides.items()]
    assert kinds == [("head x token", DraftKind.SAMPLED), ("head x match", DraftKind.ONE_HOT)] and not refused


@pytest.mark.parametrize("policy", ["heuristic", "auto_off", "cost", "confidence"])
def test_a_policy_takes_a_short_draft(policy):
    """What its file says must not keep it from gamma 1."""
    cfg = settings.from_omegaconf(composed(f"policy={policy}", "policy.gamma=1"))
    get_policy(policy, **{**cfg.policy.options, "gamma": 1} | ({"v": [1.0, 1.2]} if "v" in cfg.policy.options else {}))


def test_help_is_a_page_for_a_person():
    done = subprocess.run(
        [sys.executable, "-m", "specsparse.run", "--help"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    for word in ("usage", "examples", "+experiment=spec_smollm2", "head, layer_skip", "max_tokens: 128"):
        assert word in done.stdout
    groups = {f"{d.name}: " for d in run.conf_dir().iterdir() if d.is_dir()}  # their lists of choices grow, and wrap
    lines = [line for line in done.stdout.splitlines() if not line.startswith(tuple(groups))]
    assert max(map(len, lines)) <= 110
    assert "Hydra" not in done.stdout
