"""Model names and paths."""

import pytest

from specsparse import models
from specsparse.errors import UserError


def test_a_path_is_itself(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    assert models.resolve(path) == path
    assert models.resolve(str(path)) == path


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
        models.resolve(spec)
    assert "\n" not in str(caught.value)


def test_a_missing_package_gives_the_command(monkeypatch):
    monkeypatch.setitem(models.MODELS, "other", models.PackagedModel("no_such_package", "x.gguf", "pip install x"))
    with pytest.raises(UserError, match="'other' is not installed; run: pip install x"):
        models.resolve("other")


def test_the_file_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its requirements are missing')")
    (package / "x.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(models.MODELS, "other", models.PackagedModel("carrier", "x.gguf", ""))
    assert models.resolve("other") == package / "x.gguf"
