"""Which cells of a matrix of cases the ordinary suite runs; the slow one runs the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cells(every: Iterable[Any], ordinary: Collection[Any]) -> list[Any]:
    """All cases as parameters of a test or a fixture, in their order; those that are not `ordinary` are slow.

    The ordinary ones have every value of every option, and every pair of options that meet in code.
    """
    every = list(every)
    assert all(case in every for case in ordinary), f"{ordinary}: not all are cases of {every}"
    return [case if case in ordinary else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)
