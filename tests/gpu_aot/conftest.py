"""Compiles for an H200 on a machine without a card; `make gpu-aot` has the wheels."""

import pytest

from tests.gpu_aot import compiling


@pytest.fixture(scope="session", autouse=True)
def _wheels():
    missing = compiling.why_not()
    if missing:
        pytest.skip(f"{missing}: `make gpu-aot` installs what these tests need")
