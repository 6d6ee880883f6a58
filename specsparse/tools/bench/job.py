"""One call of the benchmark from a model's name to its report."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import Progress

from specsparse import kernels
from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.measure import conditions, trials
from specsparse.measure.conditions import Conditions
from specsparse.measure.trials import Ours, Side, TrialPlan, requantised
from specsparse.models import catalogue
from specsparse.runtime import manifest
from specsparse.runtime.load import load
from specsparse.support import terminal
from specsparse.support.files import Json
from specsparse.tools.bench import memory, summary
from specsparse.tools.peers.timed import Peer, below_expectation

_WIDE = 64
"""Rows of the batches in which a peer's perplexity is checked where prompts are timed."""


@dataclass(frozen=True)
class BenchJob:
    """What to measure on what; see the arguments of `python -m specsparse bench`."""

    model: str
    plan: TrialPlan
    depth: int = 0
    rows: int | None = None
    threads: int | None = None
    kv_dtype: str | None = None
    backend: str | None = None
    peers: tuple[str, ...] = ()
    quantise: str | None = None

    @property
    def room(self) -> int:
        """Most tokens that a test adds to the cache."""
        return max(self.plan.pp, self.plan.tg + 1, self.rows or 0, *self.plan.ns, 1)


def run(job: BenchJob, out: Console) -> Json:
    """Measures, showing progress on `out`; returns the report (see `summary.build`).

    Raises:
        UserError: anything wrong with the model, the options or the peer.
    """
    notes: list[str] = []
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(name)) for name in job.peers]  # first: a missing package costs no time
        path = catalogue.resolve(job.model)
        if job.quantise:
            path = requantised(path, job.quantise, out)
            name = path.name.rpartition("-as-")[2].removesuffix(".gguf")
            notes.append(f"re-quantised to {name} from the file's own weights, for speed only; kept as {path}")
        memory.reset_peak()
        before = memory.peak_bytes()
        with terminal.busy(out, f"loading {job.model}"):
            model = load(path, kv_dtype=job.kv_dtype, threads=job.threads, backend=job.backend)
        load_peak = memory.peak_bytes()
        _check_room(job, model)
        threads = kernels.status()["threads"] or 1
        ours = Ours(model, depth=job.depth, room=job.room, rows=job.rows)
        tests = len(job.plan.tests())
        with terminal.counting(out, "compiling and warming up", tests) as progress:
            trials.warm_up(job.plan, ours, _advance(progress))
        peaks = {"before_load": before, "load": load_peak, "load_and_warm_up": memory.peak_bytes()}
        sides: list[Side] = [ours]
        for peer in peers:
            with terminal.busy(out, f"loading {peer.name}, choosing its attention, checking its perplexity"):
                peer.open(path, model.config, threads=threads, room=job.room, depth=job.depth)
                peer.choose(job.plan)
                _check(peer, model, job.plan)
                trials.warm_up(job.plan, peer)
            sides.append(peer)
        with terminal.counting(out, "timing", job.plan.repeats * tests * len(sides)) as progress:
            results = trials.run(job.plan, sides, _advance(progress))
        f = open_gguf(path)
        found = summary.build(
            model=model,
            f=f,
            plan=job.plan,
            results=results,
            ours=ours,
            peers=[peer.facts() for peer in peers],
            threads=threads,
            peak_memory=peaks,
            manifest=manifest.build({}, path),
        )
    found["backend"] = model.kernels.name
    found["notes"] = notes + _notes(found, model)
    return found


def _advance(progress: Progress) -> Callable[[], None]:
    return lambda: progress.advance(progress.task_ids[0])


def _check(peer: Peer, model: Model, plan: TrialPlan) -> None:
    """Its logits beside ours: as many rows as are timed, with the attention that they are timed with."""
    widest = max(plan.pp and _WIDE, *plan.ns, 1)
    one = "decode" if plan.tg else "verify" if plan.ns else "prompt"
    wide = "verify" if widest in plan.ns else "prompt" if plan.pp else one
    peer.check(model, widest=widest, one=one, wide=wide)


def _check_room(job: BenchJob, model: Model) -> None:
    needed, context = job.depth + job.room, model.config.context_length
    if needed > context:
        raise UserError(
            f"the tests need {needed} tokens (depth {job.depth} and {job.room} more) and the context holds {context}: "
            "choose a smaller --pp, --tg, --n or --depth"
        )


def _notes(found: Json, model: Model) -> list[str]:
    """What a reader must know before believing the figures."""
    read = found["machine"]["read_bytes_per_second"]
    restless = conditions.busy(Conditions(read["median"], read["sd"] / read["mean"]))
    notes = [restless] if restless else []
    if model.kernels.name != "native":
        why = kernels.status()["why_not_native"] or "chosen"
        notes.append(f"these are the {model.kernels.name} kernels, not the native ones ({why})")
    for peer in found["peers"]:
        notes += wrong_logits(peer)
        if peer["name"] != "llama.cpp":
            continue
        rates = [r for r in found["results"] if r["engine"] == peer["name"] and r["test"].startswith("tg")]
        flags = found["manifest"]["cpu"]["flags"]
        for row in rates:
            kind, rate = found["model"]["main_type"], row["tokens_per_second"]["median"]
            line = below_expectation(model.config, kind, rate, flags, found["threads"], depth=row["depth"])
            if line:
                notes.append(f"{line} (ours: {found['manifest']['kernels']['isa']}; its: {peer['system_info']})")
    return notes


def wrong_logits(peer: Json) -> Iterator[str]:
    """Lines on a peer (see `Peer.facts`) whose figures are not those of this model."""
    if peer["unchecked"]:
        yield f"{peer['name']}: its perplexity was not compared with ours, so take care: {peer['unchecked']}"
    for how, found in (peer["check"] or {}).items():
        if found["wrong"]:
            rows = "one row at a time" if how == "one_row" else "in wide batches"
            yield (
                f"{peer['name']} computes other logits than this model's {rows}: perplexity {found['perplexity']:.4g}, "
                f"ours {found['ours']:.4g}, KL {found['kl']:.2g} nats; its times there are of something else"
            )


def with_one(plan: TrialPlan) -> TrialPlan:
    """The plan with n = 1 in its verify test, to which v(n) is relative."""
    return replace(plan, ns=tuple(sorted({1, *plan.ns}))) if plan.ns else plan
