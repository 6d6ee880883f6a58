"""The untimed pass that is watched round by round: traced, or its laws recorded, or both."""

from pathlib import Path
from types import TracebackType

from rich.console import Console

from specsparse.experiments.settings import DecodingSettings
from specsparse.measure.recording import LAWS_FILE, Recorder
from specsparse.measure.trace import TRACE_FILE, Trace
from specsparse.runtime.stepped import RoundView, Watch


class Watching:
    """Hands every round to those who watch; what they gather is written when it ends."""

    def __init__(self, trace: Trace | None, recorder: Recorder | None, directory: Path):
        self._trace, self._recorder, self._directory = trace, recorder, directory

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._recorder is not None and error is None:
            self._recorder.save(self._directory / LAWS_FILE)

    def start(self, prompt_id: str) -> Watch:
        """What to call with each round of the next prompt."""
        if self._trace is not None:
            self._trace.start(prompt_id)
        if self._recorder is not None:
            self._recorder.start(prompt_id)

        def watch(view: RoundView) -> None:
            if self._trace is not None:
                self._trace.round(view)
            if self._recorder is not None:
                self._recorder.round(view)

        return watch


def watching(cfg: DecodingSettings, directory: Path, out: Console) -> Watching | None:
    """The watching that the config asks for; None for none."""
    trace = Trace(directory / TRACE_FILE, out) if cfg.trace else None
    recorder = Recorder(cfg.record_laws) if cfg.record_laws else None
    return Watching(trace, recorder, directory) if trace or recorder else None
