"""Where compiled programs are kept. What a model is loaded as has its tests in tests/test_api.py."""

import jax
import pytest

from specsparse.runtime import load


@pytest.fixture
def kept():
    """Gives jax's settings back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("name", ["SPECSPARSE_CACHE", "XDG_CACHE_HOME"])
def test_compiled_programs_lie_in_the_users_cache(tmp_path, monkeypatch, kept, name):
    for other in ("SPECSPARSE_CACHE", "XDG_CACHE_HOME", "SPECSPARSE_NO_CACHE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    load._use_compilation_cache()
    folder = tmp_path if name == "SPECSPARSE_CACHE" else tmp_path / "specsparse"
    assert jax.config.jax_compilation_cache_dir == str(folder / "xla")


def test_a_cache_of_the_users_own_stays(tmp_path, kept):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    load._use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
