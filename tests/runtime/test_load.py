"""What loading compiles, and where programs are kept. What a model is loaded as has its tests in tests/test_api.py."""

import jax
import pytest

from specsparse import kernels
from specsparse.kernels.native import cpu
from specsparse.runtime import load
from specsparse.testing import write_tiny_gguf


def test_newcomer_without_a_compiler_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SPECSPARSE_REQUIRE_NATIVE", raising=False)
    monkeypatch.setattr(cpu, "library", lambda: None)
    monkeypatch.setattr(cpu, "_opened", lambda: "libspecsparse_kernels.so was not built")
    load._say_slow.cache_clear()
    path = write_tiny_gguf(tmp_path / "m.gguf", quant="F16", n_layers=1)
    for _ in range(2):
        assert load.load(path).kernels.name == "reference"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no native kernels (libspecsparse_kernels.so was not built)" in said
    assert "`make native`" in said
    load._say_slow.cache_clear()
    load.load(path, backend="reference")  # asked for
    assert not capsys.readouterr().err


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


@pytest.mark.skipif(kernels.get().name != "native", reason="the reference packs with jnp")
def test_loading_compiles_nothing(tmp_path):
    # A program of 0.1 s to copy vectors was a fourth of a small model's load. No other test has these widths.
    path = write_tiny_gguf(tmp_path / "a.gguf", architecture="gemma3", quant="Q8_0", d_model=160, d_ff=224)
    compiled = []
    listen = lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        load.load(path)
        assert not compiled
        jax.jit(lambda x: x + 1)(1.0)
        assert compiled  # a program would have been seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
