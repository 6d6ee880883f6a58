"""What every test runs under: strict promotion, a persistent compilation cache, the real model where there is one."""

import copy
import gc
import os
import signal
import sys
from pathlib import Path

import absl.logging
import huggingface_hub.constants  # noqa: F401 (reads HF_HUB_OFFLINE once: not inside a test that sets it)
import hypothesis
import jax
import pytest

ROOT = Path(__file__).resolve().parents[1]
REQUIRE_NATIVE = os.environ.get("SPECSPARSE_REQUIRE_NATIVE") == "1"

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiled programs are kept between runs of the suite, and for the processes that tests start.
for option, value in {
    "jax_compilation_cache_dir": str(ROOT / ".cache" / "jax-tests"),
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}.items():
    jax.config.update(option, value)
    os.environ[option.upper()] = str(value)
# Hydra's logging setup closes all handlers, and absl's (imported by optax) closes its stream unless it is the present
# sys.stderr or the process's: under `capsys` that stream is pytest's own capture, and every later report would be lost.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
# Tracing makes many small objects that live long; to look for circles after every 700 of them, again and again, was a
# twelfth of the suite's CPU time.
gc.set_threshold(50_000, 20, 20)
# The same examples in every run, and no limit on an example's time: the machine is shared.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None)
hypothesis.settings.load_profile("tests")
# A shell starts `make test &` with Ctrl-C ignored, and every program that a test starts and stops would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _cache_of_the_tests(tmp_path_factory):
    """Keep the user's cache directory out of the tests, and do not wait for the user's runs."""
    directory = tmp_path_factory.mktemp("cache")
    os.environ.setdefault("SPECSPARSE_CACHE", str(directory))
    os.environ.setdefault("SPECSPARSE_TIMING_LOCK", str(directory / "timing.lock"))


@pytest.fixture(autouse=True, scope="module")
def _settings_come_back():
    """A module may switch instruction sets and threads; the next one finds them as they were."""
    from specsparse.kernels.native import cpu

    isa, threads = cpu.isa(), cpu.threads()
    yield
    if cpu.available():
        cpu.set_isa(isa)
        cpu.set_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _little_memory_is_read():
    """Half a second of CPU for each sample of the read bandwidth, whose size no test asks for."""
    from specsparse.kernels.processor import ReadBuffer
    from specsparse.measure import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(machine.read_bandwidth.__kwdefaults__, "mebibytes", 8)
        patch.setattr(ReadBuffer.__init__, "__defaults__", (8,))
        yield


@pytest.fixture(autouse=True, scope="session")
def _configs_are_composed_once():
    """A config is composed of three dozen files, ours and Hydra's, which are read once. And a run composes it twice,
    first for `hydra.mode` alone: None, since no file of ours sets it. Together two thirds of the time."""
    from hydra._internal.hydra import Hydra
    from hydra.core.plugins import Plugins

    Plugins.instance()  # makes the classes below anew
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource

    from specsparse.support.files import conf_dir

    def reads_once(owner, place):
        kept, read = {}, owner.load_config

        def load_config(source, config_path):
            if not source.path.endswith(place):
                return read(source, config_path)
            if config_path not in kept:
                kept[config_path] = read(source, config_path)
            return copy.deepcopy(kept[config_path])

        patch.setattr(owner, "load_config", load_config)

    def get_mode(self, config_name, overrides):
        return mode(self, config_name, overrides) if any("hydra.mode" in word for word in overrides) else None

    with pytest.MonkeyPatch.context() as patch:
        reads_once(FileConfigSource, str(conf_dir()))
        reads_once(ImportlibResourcesConfigSource, "hydra.conf")
        mode = Hydra.get_mode
        patch.setattr(Hydra, "get_mode", get_mode)
        yield


@pytest.fixture(autouse=True, scope="session")
def _names_of_models():
    """What `specsparse.run` does before it composes a config."""
    from specsparse.experiments.command_line import offer

    offer()


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct Q4_1, loaded once; skipped where it is not installed, an error in CI."""
    import specsparse
    from specsparse.errors import UserError
    from specsparse.models import catalogue

    try:
        catalogue.resolve("smollm2-135m")
    except UserError as error:
        if REQUIRE_NATIVE:
            pytest.fail(f"the suite needs the real model: {error}")
        pytest.skip(str(error))
    return specsparse.load("smollm2-135m")
