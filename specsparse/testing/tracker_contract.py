"""The contract of a tracker, for anybody's own: `check_tracker(MyBoard())` is one line in a test."""

import copy
import tempfile
from pathlib import Path

from specsparse.experiments.settings import ModelSpec, RunConfig
from specsparse.experiments.trackers.base import Series, Tracker
from specsparse.experiments.trackers.tracking import Tracking
from specsparse.support.registry import Choice


def check_tracker(tracker: Tracker) -> None:
    """Refuses a tracker that breaks the contract of `trackers.base`: it follows a run to its end, another one that is
    stopped half way, and one more after it; the files of a run are left as they are.

    Raises:
        AssertionError: says what is broken; other errors are the tracker's own.
    """
    made = getattr(type(tracker), "__dataclass_params__", None)
    assert made is not None and made.frozen, f"put @dataclass(frozen=True) above the class {type(tracker).__name__}"
    assert hash(tracker) == hash(copy.copy(tracker)), "its hash changes"
    tracker.check()
    curve, composed = Series("training", "step", least=("loss",)), {"name": "made", "kind": "made"}
    run = RunConfig(
        model=ModelSpec("made.gguf"), drafter=Choice("none"), verifier=Choice("greedy"), policy=Choice("fixed"),
        tracker=Choice("mine"), name="made", kind="made", composed=composed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        for name, ends_well in {"first": True, "second": False, "third": True}.items():
            directory = Path(place) / name
            files = Tracking(directory)
            client = tracker.start(run, directory, Path(place))
            for step in range(1, 4):
                point = {"step": float(step), "loss": 1 / step, "late": float("nan")}
                files.point(curve, point)
                tracker.log(client, curve, point)
            files.finish({"name": "made", "kind": "made", "summary": {"loss": 1 / 3}, "config": composed})
            before = {file: file.read_bytes() for file in directory.glob("*.json*")}
            if ends_well:
                line = tracker.finish(client, directory)
                assert line is None or len(line.splitlines()) == 1, f"finish returns {line!r}, not one line"
            else:
                tracker.stop(client)
            for file, content in before.items():
                assert file.is_file() and file.read_bytes() == content, f"{file.name} is the run's and was changed"
