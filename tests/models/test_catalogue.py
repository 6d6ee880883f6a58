"""Model names and paths."""

import pytest

from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.models import catalogue
from specsparse.models.convert.delta import make_delta
from specsparse.models.convert.set_metadata import set_metadata
from specsparse.testing import write_tiny_gguf


def test_a_path_is_itself(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    assert catalogue.resolve(path) == path
    assert catalogue.resolve(str(path)) == path


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("smollm2", "unknown model 'smollm2': did you mean smollm2-135m"),
        ("SmolLM2-135M", "did you mean smollm2-135m"),
        ("zzz", "smollm2-135m"),
        ("hf://a", "hf://a: is no reference to the Hub; the form is hf://owner/repo/file.gguf"),
        ("none.gguf", "none.gguf: no such file"),
        ("some/where", "no such file"),
        ("", "no model given"),
        ("a\0b", "unknown model"),
        ("x" * 9999, "unknown model"),
    ],
)
def test_what_is_not_there(spec, says):
    with pytest.raises(UserError, match=says) as caught:
        catalogue.resolve(spec)
    assert "\n" not in str(caught.value)


def test_a_missing_package_gives_the_command(monkeypatch):
    missing = catalogue.PackagedModel("no_such_package", "x.gguf", "pip install x")
    monkeypatch.setitem(catalogue.MODELS, "other", missing)
    with pytest.raises(UserError, match="'other' is not installed; run: pip install x"):
        catalogue.resolve("other")


def test_the_file_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its requirements are missing')")
    (package / "x.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(catalogue.MODELS, "other", catalogue.PackagedModel("carrier", "x.gguf", ""))
    assert catalogue.resolve("other") == package / "x.gguf"


def test_a_derived_model_is_made_once_and_anew_for_another_difference(tmp_path, monkeypatch, capsys):
    (tmp_path / "carrier").mkdir()
    base = write_tiny_gguf(tmp_path / "carrier" / "x.gguf", quant="Q8_0", n_layers=1)
    (tmp_path / "carrier" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SPECSPARSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(catalogue.MODELS, "base", catalogue.PackagedModel("carrier", "x.gguf", ""))
    monkeypatch.setitem(catalogue.DERIVED, "made", catalogue.DerivedModel("base", "d.gguf"))
    monkeypatch.setattr(catalogue, "COMPANION", "carrier")
    with pytest.raises(UserError, match=r"model 'made' is not installed; run: pip install \./specsparse-models"):
        catalogue.resolve("made")
    set_metadata(base, "general.name", "one", tmp_path / "one.gguf")
    make_delta(base, tmp_path / "one.gguf", tmp_path / "carrier" / "d.gguf")
    first = catalogue.resolve("made")
    assert open_gguf(first).metadata["general.name"] == "one" and "making made of base" in capsys.readouterr().err
    assert catalogue.resolve("made") == first and not capsys.readouterr().err
    set_metadata(base, "general.name", "two", tmp_path / "two.gguf")
    make_delta(base, tmp_path / "two.gguf", tmp_path / "carrier" / "d.gguf")
    assert open_gguf(catalogue.resolve("made")).metadata["general.name"] == "two"


def test_what_travels_with_a_model(tmp_path, monkeypatch):
    """Only for a name of ours: a file of the user's may be called the same."""
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(catalogue, "COMPANION", "carrier")
    for name in ("smollm2-135m-relu", "mine"):
        (package / f"{name}.predictors.safetensors").write_bytes(b"")
    found = catalogue.companion("smollm2-135m-relu", "predictors")
    assert found == package / "smollm2-135m-relu.predictors.safetensors"
    assert catalogue.companion("smollm2-135m-relu", "activations") is None
    assert catalogue.companion("mine", "predictors") is None
