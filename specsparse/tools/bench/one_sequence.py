"""`bench speed`: prompts, decoding and v(n) of one sequence, here and in other engines, beside the machine's peaks."""

import contextlib
import re
import resource
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsparse import kernels
from specsparse.cli.arguments import load_options
from specsparse.engine.cache import LayerWindows
from specsparse.engine.gguf import requantise
from specsparse.engine.gguf.reader import FLOAT_TYPES, open_gguf
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.measure import conditions, manifest, trials
from specsparse.measure.conditions import Conditions
from specsparse.measure.costs.roofline import kv_bytes
from specsparse.measure.trials import OURS, Ours, Side, TrialPlan, TrialResults, paired_ratio, summary, timings
from specsparse.models import catalogue
from specsparse.runtime.load import load
from specsparse.support import tables, terminal
from specsparse.support.files import Json
from specsparse.tools.peers.peer import Peer, below_expectation, perplexities, wrong_logits

_WIDE = 64  # rows of the batches in which a peer's perplexity is checked if prompts are timed
_MIB = 2**20
_METHODS = {"prompt": "prompts", "decode": "decoding", "verify": "v(n)"}


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """A bench of a model, which `cli.arguments.add_model_options` says how to load."""

    model: str  # a name or a file
    tg: int = 128  # tokens of each text
    repeats: int = 5  # timings of each test
    context: int | None = None
    threads: int | None = None
    kv_dtype: str | None = None
    backend: str | None = None
    mesh: int | None = None
    peers: tuple[str, ...] = ()  # names of other engines

    def load(self, path: Path, out: Console) -> Model:
        with terminal.busy(out, f"loading {self.model}"):
            return load(path, **load_options(self))


@dataclass(frozen=True, kw_only=True)
class SequenceBench(ModelBench):
    """Prompts, decoding and v(n) of one sequence; 0 or () leaves a test out."""

    pp: int = 512
    ns: tuple[int, ...] = ()  # of v(n); 1, which it is relative to, is timed too
    depth: int = 0  # tokens in the cache before each test
    rows: int | None = None  # of the program of v(n), n of them valid; None for one of n rows
    quantise: str | None = None  # a type that the model is re-quantised to before

    def plan(self) -> TrialPlan:
        return TrialPlan(self.pp, self.tg, tuple(sorted({1, *self.ns})) if self.ns else (), self.repeats)

    def check(self) -> None:
        plan = self.plan()
        if not plan.tests():
            raise UserError("nothing to measure: give --pp, --tg or --widths")
        if self.rows is not None and self.rows < max(plan.ns, default=0):
            raise UserError(f"--rows {self.rows} is less than the largest of --widths, {max(plan.ns)}")
        if self.quantise:
            requantise.kind_of(self.quantise)
        open_gguf(catalogue.resolve(self.model))

    def run(self, out: Console) -> Json:
        """The report: see `_report`, with its notes."""
        plan, notes = self.plan(), []
        room = max(plan.pp, plan.tg + 1, self.rows or 0, *plan.ns, 1)  # most tokens that a test adds to the cache
        with ExitStack() as stack:
            peers = [stack.enter_context(Peer(name)) for name in self.peers]  # first: a missing package costs no time
            path = catalogue.resolve(self.model)
            if self.quantise:
                path = trials.requantised(path, self.quantise, out)
                name = path.name.rpartition("-as-")[2].removesuffix(".gguf")
                notes.append(f"re-quantised to {name} from the file's own weights, for speed only; kept as {path}")
            reset_peak_memory()
            memory = {"before_load": peak_memory()}
            model = self.load(path, out)
            memory["load"] = peak_memory()
            trials.need_room(model.config, self.depth + room, "--pp, --tg, --widths or --depth")
            ours, tests = Ours(model, depth=self.depth, room=room, rows=self.rows), len(plan.tests())
            with terminal.counting(out, "compiling and warming up", tests) as step:
                trials.warm_up(plan, ours, step)
            memory["load_and_warm_up"] = peak_memory()
            threads, sides = kernels.status()["threads"] or 1, list[Side]([ours])
            for peer in peers:
                with terminal.busy(out, f"loading {peer.name}, choosing its attention, checking its perplexity"):
                    peer.open(path, model.config, threads=threads, room=room, depth=self.depth)
                    peer.choose(plan)
                    # As many rows as are timed, with the attention that they are timed with.
                    widest = max(plan.pp and _WIDE, *plan.ns, 1)
                    one = "decode" if plan.tg else "verify" if plan.ns else "prompt"
                    wide = "verify" if widest in plan.ns else "prompt" if plan.pp else one
                    peer.check(model, widest=widest, one=one, wide=wide)
                    trials.warm_up(plan, peer)
                sides.append(peer)
            with terminal.counting(out, "timing", plan.repeats * tests * len(sides)) as step:
                results = trials.run(plan, sides, step)
            facts = [peer.facts() for peer in peers]
            alone: dict[int, list[float]] = {}  # seconds of attention by the number of rows
            if self.depth and not self.mesh and model.kernels.name == "native":
                for n in plan.ns:
                    ours.attention(n)
                    alone[n] = [ours.attention(n) for _ in range(plan.repeats)]
        found = _report(plan, results, model, ours, peers=facts, threads=threads, memory=memory)
        found["attention"] = {
            str(n): _attention(n, each, model, self.depth, results.machine) for n, each in alone.items()
        }
        return {**found, "notes": [*notes, *_notes(found, model)]}

    def parts(self, report: Json) -> Iterator[Table | Text | str]:
        if self.pp or self.tg:
            yield _results_table(report)
        if self.ns:
            yield _verify_table(report)
        yield from _lines(report)


class PassWork(NamedTuple):
    # weights as in the file, once a forward, with experts those of one row, and the cache: the least that must be read
    file_bytes: float
    moved_bytes: float  # the same with the weights as packed
    macs: float  # of all matrices and of attention


def work_of(model: Model, method: str, n: int, depth: int, forwards: int = 1) -> PassWork:
    """The work of a test over n tokens after `depth`, in `forwards` passes of n / forwards rows."""
    c = model.config
    layers = sum(prod(c.projection_shape(p)) * c.share_read(f"{p}.weight") for p in c.projections) * c.n_layers
    windows = LayerWindows.from_config(c)
    seen = windows.attended(n, depth)  # by all rows together
    logits = 1 if method == "prompt" else n
    attention = 2 * c.n_layers * c.n_heads * c.head_dim * seen
    cache = kv_bytes(c, seen if method == "decode" else windows.read(n, depth), model.kv_dtype)
    return PassWork(
        file_bytes=model.footprint.file * forwards + cache,
        moved_bytes=model.footprint.packed * forwards + cache,
        macs=layers * n + c.vocab_size * c.d_model * logits + attention,
    )


def _attention(n: int, each: Sequence[float], model: Model, depth: int, machine: trials.MachinePeaks) -> Json:
    """The layers' attention of n rows alone: the cache is all that it must read."""
    c, windows = model.config, LayerWindows.from_config(model.config)
    s, read = statistics.median(each), kv_bytes(c, windows.read(n, depth), model.kv_dtype)
    macs = 2 * c.n_layers * c.n_heads * c.head_dim * windows.attended(n, depth)
    return {
        **timings(each, n), "bytes_per_second": read / s, "macs_per_second": macs / s,
        "share_of_read_bandwidth": read / s / statistics.median(machine.read),
        "share_of_f32_peak": macs / s / statistics.median(machine.f32),
    }  # fmt: skip


def _report(
    plan: TrialPlan, results: TrialResults, model: Model, ours: Ours, *, peers: Sequence[Json], threads: int,
    memory: Mapping[str, int],
) -> Json:  # fmt: skip
    """Rates, bytes, shares, v(n) and ratios as JSON; `peers` are `Peer.facts`, `memory` peaks of resident bytes."""
    f, machine = open_gguf(model.path), results.machine
    peak_name = "f32" if f.main_type() in FLOAT_TYPES else "int8"
    peak: list[float] = getattr(machine, peak_name)
    rows = []
    for test in plan.tests():
        work = work_of(model, test.method, test.n, ours.depth, test.n if test.method == "decode" else 1)
        for side, each in results.seconds[test.name].items():
            s = statistics.median(each)
            share = paired_ratio([work.file_bytes / x for x in each], machine.read)["median"]
            of_peak = paired_ratio([work.macs / x for x in each], peak)["median"] if peak else None
            rows.append({
                "test": test.name, "engine": side, "n": test.n, "depth": ours.depth, **timings(each, test.n),
                "bytes_per_second": work.file_bytes / s, "moved_bytes_per_second": work.moved_bytes / s,
                "share_of_read_bandwidth": share, "macs_per_second": work.macs / s, "share_of_compute_peak": of_peak,
            })  # fmt: skip
    v: dict[str, dict[str, Json]] = {}
    for n in plan.ns:
        for side, each in results.seconds[f"v{n}"].items():
            v.setdefault(side, {})[str(n)] = paired_ratio(each, results.seconds["v1"][side])
    ratios = {
        peer["name"]: {test: paired_ratio(sides[peer["name"]], sides[OURS]) for test, sides in results.seconds.items()}
        for peer in peers
    }
    about = manifest.build({}, model.path)
    output = f.tensors.get("output.weight") or f.tensors["token_embd.weight"]
    types = dict.fromkeys((f.main_type(), output.type.name))
    return {
        "bench": "specsparse",
        "model": {
            **(about.get("model") or {}), "name": f.metadata.get("general.name"), "type": " + ".join(types),
            "main_type": f.main_type(), "parameters": sum(prod(t.shape) for t in f.tensors.values()),
            "bytes_read_per_token": model.footprint.file, "bytes_packed_per_token": model.footprint.packed,
        },
        "threads": threads, "kv_dtype": model.kv_dtype,
        "plan": {**asdict(plan), "depth": ours.depth, "verify_rows": ours.rows, "verify_forwards": ours.forwards},
        "load_s": model.load_s, "compiled": [asdict(c) for c in ours.compiled], "peak_memory_bytes": dict(memory),
        "machine": {
            "read_bytes_per_second": summary(machine.read),
            "int8_macs_per_second": summary(machine.int8) if machine.int8 else None,
            "f32_macs_per_second": summary(machine.f32), "compute_peak": peak_name,
        },
        "results": rows, "v": v, "peers": list(peers), "ratios": ratios,
        "manifest": {k: v for k, v in about.items() if k != "model"}, "backend": model.kernels.name,
    }  # fmt: skip


def _notes(found: Json, model: Model) -> list[str]:
    """Reasons to doubt the figures, a line each."""
    read = found["machine"]["read_bytes_per_second"]
    restless = conditions.busy(Conditions(read["median"], read["sd"] / read["mean"]))
    notes = [restless] if restless else []
    if model.kernels.name != "native":
        why = kernels.status()["why_not_native"] or "chosen"
        notes.append(f"these are the {model.kernels.name} kernels, not the native ones ({why})")
    for peer in found["peers"]:
        notes += wrong_logits(peer)
        for row in found["results"] if peer["name"] == "llama.cpp" else ():
            if row["engine"] != peer["name"] or not row["test"].startswith("tg"):
                continue
            kind, rate = found["model"]["main_type"], row["tokens_per_second"]["median"]
            flags = found["manifest"]["cpu"]["flags"]
            line = below_expectation(model.config, kind, rate, flags, found["threads"], depth=row["depth"])
            if line:
                notes.append(f"{line} (ours: {found['manifest']['kernels']['isa']}; its: {peer['system_info']})")
    return notes


def _results_table(report: Json) -> Table:
    """One row a test and engine, as llama-bench has them; prompt and decode tests only."""
    ratios = report["ratios"]
    columns = ("engine", "test", "tok/s (mean ± sd)", "ms/token", "GB/s", "of read")
    of_peak = f"of {report['machine']['compute_peak']}"
    table = tables.new(*columns, of_peak, *(f"over {name}" for name in ratios), close=True)
    for row in report["results"]:
        if row["test"].startswith("v"):
            continue
        rate, share, ours = row["tokens_per_second"], row["share_of_compute_peak"], row["engine"] == OURS
        decoding = row["test"].startswith("tg")
        table.add_row(
            row["engine"],
            f"{row['test']} @ d{row['depth']}" if row["depth"] else row["test"],
            f"{rate['median']:.1f} ({rate['mean']:.1f} ± {rate['sd']:.1f})",
            f"{row['ms_per_token']:.3f}",
            f"{row['bytes_per_second'] / 1e9:.1f}" if decoding else "-",
            f"{row['share_of_read_bandwidth']:.0%}" if decoding else "-",
            "-" if share is None else f"{share:.0%}",
            *(f"{by[row['test']]['median']:.2f}x" if ours else "-" for by in ratios.values()),
        )
    return table


def _verify_table(report: Json) -> Table:
    sides, ratios = report["v"], report["ratios"]
    columns = [c for side in sides for c in (f"{side}, ms", "v(n)", "±")]
    attention = report["attention"]
    columns += ["attention, ms", "of read", "of f32"] if attention else []
    table = tables.new("n", *columns, *(f"over {name}" for name in ratios), close=True)
    by_key = {(row["test"], row["engine"]): row for row in report["results"]}
    for n in sides[OURS]:
        cells = []
        for side, found in sides.items():
            v = found[n]
            cells += [f"{by_key[f'v{n}', side]['ms_per_token'] * int(n):.2f}", f"{v['median']:.2f}", f"{v['sd']:.2f}"]
        if alone := attention.get(n):
            shares = (alone["share_of_read_bandwidth"], alone["share_of_f32_peak"])
            cells += [f"{alone['ms_per_token'] * int(n):.2f}", *(f"{share:.0%}" for share in shares)]
        table.add_row(n, *cells, *(f"{by[f'v{n}']['median']:.2f}x" for by in ratios.values()))
    return table


def _lines(report: Json) -> Iterator[Text | str]:
    """Model, machine, code, load and compile times, memory, the peers."""
    model, manifest = report["model"], report["manifest"]
    kernels, cpu, git = manifest["kernels"], manifest["cpu"], manifest["git"]
    name = model.get("name") or model.get("file")
    size = f"{model['bytes'] / _MIB:.0f} MiB, {model['parameters'] / 1e6:.0f} M parameters"
    yield f"model     {name}, {model['type']}, {size} ({model.get('file')})"
    in_file, packed = model["bytes_read_per_token"] / _MIB, model["bytes_packed_per_token"] / _MIB
    yield f"weights   {in_file:.1f} MiB a token ({packed:.1f} MiB as packed), cache {report['kv_dtype']}"
    isa = f" {kernels['isa']}" if report["backend"] == "native" else ""
    commit = f"commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else "no checkout"
    yield f"engine    {report['backend']}{isa} kernels, {report['threads']} threads, {commit}"
    yield f"cpu       {cpu['model']}, {cpu['cores']} cores: {' '.join(cpu['flags']) or cpu['architecture']}"
    reached = (
        ("reads {:.1f} GB/s (best {:.1f})", "read_bytes_per_second"),
        ("int8 {:.0f} GMAC/s (best {:.0f})", "int8_macs_per_second"),
        ("f32 {:.0f} GMAC/s (best {:.0f})", "f32_macs_per_second"),
    )
    rates = [(text, report["machine"][key]) for text, key in reached if report["machine"][key]]
    yield f"machine   {', '.join(text.format(x['median'] / 1e9, x['max'] / 1e9) for text, x in rates)}"
    compiled = []
    for cached, how in ((False, "cold"), (True, "from the persistent cache")):
        spent = [c["seconds"] for c in report["compiled"] if c["cached"] == cached]
        if spent:
            compiled.append(f"{sum(spent):.2f} s {how} ({len(spent)} programs, longest {max(spent):.2f} s)")
    yield f"load      {report['load_s']:.2f} s; compile {', '.join(compiled) or 'nothing'}"
    before, load, warm = (report["peak_memory_bytes"][k] / _MIB for k in ("before_load", "load", "load_and_warm_up"))
    yield f"memory    {load:.0f} MiB at most while loading, {warm:.0f} MiB until warm, {before:.0f} MiB before"
    for peer in report["peers"]:
        yield f"peer      {peer['version']}, load {peer['load_s']:.2f} s, its build: {peer['system_info']}"
        if peer["flash"]:
            chosen = (f"{'on' if on else 'off'} for {_METHODS[method]}" for method, on in peer["flash"].items())
            yield f"          flash attention, the faster of on and off: {', '.join(chosen)}"
        if peer["check"]:
            yield f"          {perplexities(peer['check'])}"
    for note in report["notes"]:
        yield Text(f"note      {note}", style="yellow")


def reset_peak_memory() -> None:
    """Starts the peak anew if the system can (Linux); elsewhere it stays the process's."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most bytes that were resident since `reset_peak_memory`."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found:
            return 1024 * int(found.group(1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
