"""Base of trackers. Yours is one file: `tracker=mine:Board`, or an entry point of the group `specsparse.trackers`."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specsparse.experiments.settings import RunConfig


@dataclass(frozen=True)
class Series:
    """Numbers that a run logs while it goes on.

    Attributes:
        name: of their section of the charts.
        axis: the one that the others are drawn over; it rises.
        least, most: those whose least or greatest value is the best; a name stands for all that begin with it.
    """

    name: str
    axis: str
    least: tuple[str, ...] = ()
    most: tuple[str, ...] = ()


class Tracker(abc.ABC):
    """Follows a run. Derive a frozen dataclass from it; the fields are its options.

    Its methods are called in this order, `log` as often as there are points. Kinds that measure time start it when
    their record is written, since the work of a tracker would be measured too; their points come then, all at once. An
    error of `log` or `finish` ends the following, not the run, and is one line of warning.
    """

    def check(self) -> None:  # noqa: B027 (it may do nothing)
        """UserError: it cannot start here. Asked before anything is loaded, for every run of a sweep."""

    @abc.abstractmethod
    def start(self, run: "RunConfig", directory: Path, folder: Path | None) -> Any:
        """Begins to follow a run.

        Args:
            run: its config.
            directory: of its files.
            folder: the one that a stopped training goes on from; None of other kinds. A tracker that keeps there which
                run it was goes on with that one.

        Returns:
            The client, which the other methods are given.

        Raises:
            UserError: it cannot start; the run ends before its work begins.
        """

    def log(self, client: Any, series: Series, values: Mapping[str, float]) -> None:  # noqa: B027
        """Takes a point of a series: numbers by name, the axis among them."""

    def finish(self, client: Any, directory: Path) -> str | None:  # noqa: B027
        """Takes what the finished run has written into its directory; returns a line that says where it is now."""

    def stop(self, client: Any) -> None:  # noqa: B027
        """Lets go of a client whose run has ended with an error, or whose own `log` or `finish` has."""


@dataclass(frozen=True)
class Jsonl(Tracker):
    """The files of the run alone."""

    def start(self, run: "RunConfig", directory: Path, folder: Path | None) -> None:
        """Starts nothing: a run without a tracker has no client."""
