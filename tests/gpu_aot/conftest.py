"""Compiles for an H200 on a machine without a card; `make gpu-aot` has the wheels."""

import jax
import pytest

from tests.gpu_aot import compiling


@pytest.fixture(scope="session", autouse=True)
def _wheels():
    missing = compiling.why_not()
    if missing:
        pytest.skip(f"{missing}: `make gpu-aot` installs what these tests need")
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program has no registers to show
    yield
    jax.config.update("jax_enable_compilation_cache", True)
