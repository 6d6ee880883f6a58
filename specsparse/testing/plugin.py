"""The pytest plugin: a fixture `assert_lossless`, and a line for each certificate at the end of the run.

    pytest_plugins = ["specsparse.testing.plugin"]  # in conftest.py

    def test_mine(assert_lossless):
        assert_lossless(my_verifier)

It imports nothing until the fixture is used. It has no entry point: pytest would warn in each run of an environment in
which specsparse is an editable install.
"""

import pytest

LINES = pytest.StashKey[list[str]]()


@pytest.fixture
def assert_lossless(request: "pytest.FixtureRequest"):
    """`specsparse.testing.assert_lossless`, whose report is summed up at the end of the run."""
    from specsparse.testing.lossless import assert_lossless as certified

    def run(verifier, **how):
        report = certified(verifier, **how)
        found = f"finds a total variation of {report.finds:.2g}" if report.finds else f"covers {report.covered()}"
        request.config.stash.setdefault(LINES, []).append(f"{request.node.nodeid}: {report!r}; {found}")
        return report

    return run


def pytest_terminal_summary(terminalreporter, config: "pytest.Config") -> None:
    """The certificates of this run, if there are any."""
    if lines := config.stash.get(LINES, []):
        terminalreporter.section("certified lossless")
        for line in lines:
            terminalreporter.line(line)
