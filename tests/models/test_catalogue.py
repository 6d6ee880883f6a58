"""Model names and paths."""

import pytest

from specsparse.cli.arguments import drafter_of
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.models import catalogue
from specsparse.models.convert.edit import make_delta, set_metadata
from specsparse.support.files import size_text
from specsparse.support.registry import Choice
from specsparse.testing import write_tiny_gguf


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes entries into the user's folder."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setenv(catalogue.OWN, str(folder))

    def write(name, text):
        (folder / f"{name}.yaml").write_text(text)
        catalogue._entry.cache_clear()

    catalogue._entry.cache_clear()
    yield write
    catalogue._entry.cache_clear()


@pytest.fixture
def carrier(tmp_path, monkeypatch):
    """A package that carries models, and must not be imported for that."""
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its requirements are missing')")
    monkeypatch.syspath_prepend(tmp_path)
    return package


MINE = "{what: a model, good_for: tests, package: carrier, file: x.gguf, install: pip install x}"


def test_a_path_is_itself(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    assert catalogue.resolve(path) == path
    assert catalogue.resolve(str(path)) == path


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("smollm", "unknown model 'smollm': did you mean smollm2"),
        ("SmolLM2-135M", "did you mean smollm2-135m"),
        ("zzz", "unknown model 'zzz': smollm2-135m.* need no network"),
        ("hf://a", "hf://a: is no reference to the Hub; the form is owner/repo, owner/repo:Q4_K_M or hf://"),
        ("none.gguf", "none.gguf: no such file"),
        ("https://huggingface.co/a/b/tree/main", "no such file; of the Hub it is hf://a/b$"),
        ("HF://a/b", "no such file; of the Hub it is hf://a/b$"),
        ("some/where", "no such file"),
        ("", "unknown model"),
        ("a\0b", "unknown model"),
        ("x" * 9999, "unknown model"),
    ],
)
def test_what_is_not_there(spec, says):
    with pytest.raises(UserError, match=says) as caught:
        catalogue.resolve(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(catalogue.entries()))
def test_an_entry_of_ours_claims_nothing_without_a_source(name):
    entry = catalogue.entries()[name]
    assert entry.source or not (entry.size or entry.sha256 or entry.revision or entry.licence)
    assert all(catalogue.find(draft).role in ("draft", "head", "target") for draft in entry.drafts)
    assert entry.what and entry.good_for and catalogue.find(name) is entry
    assert all(catalogue.find(alias) is entry for alias in entry.aliases)


def test_an_entry_of_the_user_adds_to_ours_and_stands_before_them(own, carrier):
    own("mine", MINE)
    own("llama-160m", MINE.replace("a model", "another"))
    (carrier / "x.gguf").touch()
    assert {"mine", "llama-2-7b"} <= set(catalogue.names())
    assert catalogue.resolve("mine") == catalogue.resolve("llama-160m") == carrier / "x.gguf"
    assert catalogue.find("llama-160m").what == "another"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a]", "is no entry of the catalogue"),
        ("{what: x", "cannot be read"),
        ("what: x", "good_for: a value is needed"),
        ("{what: x, good_for: y}", "one of package, base and repo is needed, not none"),
        ("{what: x, good_for: y, repo: a/b, base: c, delta: d}", "not base and repo"),
        ("{what: x, good_for: y, repo: a/b, fiel: c}", "mine.yaml.fiel is no option; did you mean file?"),
        ("{what: x, good_for: y, repo: a/b, size: big}", "mine.yaml.size=big must be a whole number"),
        ("{what: x, good_for: y, repo: a/b, file: c, convert: f16}", "convert is for a checkpoint"),
        ("{what: x, good_for: y, repo: a/b, convert: q9}", "must be one of f16"),
        ("{what: x, good_for: y, package: a}", "package needs file and install"),
        ("{what: x, good_for: y, base: a}", "base needs delta"),
    ],
)
def test_a_bad_entry_is_one_line_with_its_file(own, text, says):
    own("mine", text)
    with pytest.raises(UserError, match=says) as caught:
        catalogue.entries()
    assert "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_package_gives_the_command(own):
    own("other", MINE.replace("carrier", "no_such_package"))
    with pytest.raises(UserError, match=r"'other' is not installed; run: .* -m pip install x"):
        catalogue.resolve("other")


def test_a_derived_model_is_made_once_and_anew_for_another_difference(own, carrier, tmp_path, monkeypatch, capsys):
    base = write_tiny_gguf(carrier / "x.gguf", quant="Q8_0", n_layers=1)
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path / "cache"))
    own("base", MINE)
    own("made", "{what: a model, good_for: tests, base: base, delta: d.gguf}")
    monkeypatch.setattr(catalogue, "COMPANION", "carrier")
    with pytest.raises(UserError, match=r"model 'made' is not installed; run: .* -m pip install .*/specsparse-models$"):
        catalogue.resolve("made")
    set_metadata(base, "general.name", "one", tmp_path / "one.gguf")
    make_delta(base, tmp_path / "one.gguf", carrier / "d.gguf")
    first = catalogue.resolve("made")
    assert open_gguf(first).metadata["general.name"] == "one" and "making made of base" in capsys.readouterr().err
    assert catalogue.resolve("made") == first and not capsys.readouterr().err
    set_metadata(base, "general.name", "two", tmp_path / "two.gguf")
    make_delta(base, tmp_path / "two.gguf", carrier / "d.gguf")
    assert open_gguf(catalogue.resolve("made")).metadata["general.name"] == "two"


def test_what_travels_with_a_model(carrier, monkeypatch):
    """Only for a name of ours: a file of the user's may be called the same."""
    monkeypatch.setattr(catalogue, "COMPANION", "carrier")
    for name in ("smollm2-135m-relu", "mine"):
        (carrier / f"{name}.predictors.safetensors").write_bytes(b"")
    found = catalogue.companion("smollm2-135m-relu", "predictors")
    assert found == carrier / "smollm2-135m-relu.predictors.safetensors"
    assert catalogue.companion("smollm2-135m-relu", "activations") is None
    assert catalogue.companion("mine", "predictors") is None


def test_a_split_model_is_here_when_all_its_parts_are(own, tmp_path, monkeypatch):
    own("parts", "{what: a model, good_for: tests, repo: a/b, file: p-00001-of-00002.gguf}")
    monkeypatch.setenv("SPECSPARSE_MODELS", str(tmp_path))
    (tmp_path / "p-00001-of-00002.gguf").touch()
    with pytest.raises(catalogue.NotHere, match=r"p-00001-of-00002.gguf \(huggingface.co/a/b\) is not on this machine"):
        catalogue.resolve("parts")
    (tmp_path / "p-00002-of-00002.gguf").touch()
    assert catalogue.resolve("parts") == tmp_path / "p-00001-of-00002.gguf"


@pytest.mark.parametrize(("size", "text"), [(3.825e9, "3.8 GB"), (325e6, "325 MB"), (16.2e9, "16 GB"), (1200, "1 kB")])
def test_sizes_as_people_say_them(size, text):
    assert size_text(size) == text


def test_commands_draft_by_what_the_catalogue_names():
    for model, usual in {"smollm2": "mixed", "smollm2-135m-relu": "prompt_lookup", "my.gguf": "prompt_lookup"}.items():
        assert drafter_of(None, None, model).name == usual
        assert drafter_of("suffix", None, model).name == "suffix"
        assert drafter_of(None, "smollm2-draft", model) == Choice("model", {"model": "smollm2-draft"})
