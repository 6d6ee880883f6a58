"""What every module of kernel tests needs."""

import pytest

from specsparse.kernels import native_cpu


@pytest.fixture(autouse=True, scope="module")
def _settings_come_back():
    """A module may switch instruction sets and threads; the next one finds them as they were."""
    isa, threads = native_cpu.isa(), native_cpu.threads()
    yield
    if native_cpu.available():
        native_cpu.set_isa(isa)
        native_cpu.set_threads(threads)
