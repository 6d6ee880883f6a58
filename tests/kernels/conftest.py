"""What every module of kernel tests needs."""

import pytest

from specsparse.kernels.native import cpu


@pytest.fixture(autouse=True, scope="module")
def _settings_come_back():
    """A module may switch instruction sets and threads; the next one finds them as they were."""
    isa, threads = cpu.isa(), cpu.threads()
    yield
    if cpu.available():
        cpu.set_isa(isa)
        cpu.set_threads(threads)
