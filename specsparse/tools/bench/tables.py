"""A report as tables and lines for the terminal."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from specsparse.measure.trials import OURS
from specsparse.support import tables
from specsparse.support.files import Json
from specsparse.tools.peers.timed import perplexities

MIB = 2**20
_TESTS = {"prompt": "prompts", "decode": "decoding", "verify": "v(n)"}


def results(report: Json) -> Table:
    """One row a test and engine, as llama-bench has them; prompt and decode tests only."""
    peak = f"of {report['machine']['compute_peak']}"
    columns = ("engine", "test", "tok/s (mean ± sd)", "ms/token", "GB/s", "of read", peak)
    ratios = report["ratios"]
    table = tables.new(*columns, *_over(ratios), close=True)
    for row in report["results"]:
        if row["test"].startswith("v"):
            continue
        rate, ours = row["tokens_per_second"], row["engine"] == OURS
        decoding = row["test"].startswith("tg")
        table.add_row(
            row["engine"],
            f"{row['test']} @ d{row['depth']}" if row["depth"] else row["test"],
            f"{rate['median']:.1f} ({rate['mean']:.1f} ± {rate['sd']:.1f})",
            f"{row['ms_per_token']:.3f}",
            f"{row['bytes_per_second'] / 1e9:.1f}" if decoding else "-",
            _percent(row["share_of_read_bandwidth"]) if decoding else "-",
            _percent(row["share_of_compute_peak"]),
            *(f"{by[row['test']]['median']:.2f}x" if ours else "-" for by in ratios.values()),
        )
    return table


def verify(report: Json) -> Table:
    """v(n) of every engine."""
    sides, ratios = report["v"], report["ratios"]
    columns = [c for side in sides for c in (f"{side}, ms", "v(n)", "±")]
    table = tables.new("n", *columns, *_over(ratios), close=True)
    by_key = {(row["test"], row["engine"]): row for row in report["results"]}
    for n in sides[OURS]:
        cells = []
        for side, found in sides.items():
            v = found[n]
            cells += [f"{by_key[f'v{n}', side]['ms_per_token'] * int(n):.2f}", f"{v['median']:.2f}", f"{v['sd']:.2f}"]
        table.add_row(n, *cells, *(f"{by[f'v{n}']['median']:.2f}x" for by in ratios.values()))
    return table


def _over(ratios: Json) -> list[str]:
    """Heads of the columns of our speed over each peer's."""
    return [f"over {name}" for name in ratios]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def lines(report: Json) -> Iterator[Text]:
    """What the tables stand on: model, machine, code, load and compile times, memory, the peer."""
    model, machine, manifest = report["model"], report["machine"], report["manifest"]
    kernels, cpu, git = manifest["kernels"], manifest["cpu"], manifest["git"]
    name = model.get("name") or model.get("file")
    size = f"{model['bytes'] / MIB:.0f} MiB, {model['parameters'] / 1e6:.0f} M parameters"
    yield Text(f"model     {name}, {model['type']}, {size} ({model.get('file')})")
    in_file, packed = model["bytes_read_per_token"] / MIB, model["bytes_packed_per_token"] / MIB
    yield Text(f"weights   {in_file:.1f} MiB a token ({packed:.1f} MiB as packed), cache {report['kv_dtype']}")
    isa = f" {kernels['isa']}" if report["backend"] == "native" else ""
    commit = f"commit {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git else "no checkout"
    yield Text(f"engine    {report['backend']}{isa} kernels, {report['threads']} threads, {commit}")
    yield Text(f"cpu       {cpu['model']}, {cpu['cores']} cores: {' '.join(cpu['flags']) or cpu['architecture']}")
    yield Text(f"machine   {_machine_line(machine)}")
    yield Text(f"load      {report['load_s']:.2f} s; compile {_compile_line(report['compiled'])}")
    before, load, warm = (report["peak_memory_bytes"][k] / MIB for k in ("before_load", "load", "load_and_warm_up"))
    yield Text(f"memory    {load:.0f} MiB at most while loading, {warm:.0f} MiB until warm, {before:.0f} MiB before")
    for peer in report["peers"]:
        yield Text(f"peer      {peer['version']}, load {peer['load_s']:.2f} s, its build: {peer['system_info']}")
        if peer["flash"]:
            chosen = ", ".join(f"{'on' if on else 'off'} for {_TESTS[method]}" for method, on in peer["flash"].items())
            yield Text(f"          flash attention, the faster of on and off: {chosen}")
        if peer["check"]:
            yield Text(f"          {perplexities(peer['check'])}")
    for note in report["notes"]:
        yield Text(f"note      {note}", style="yellow")


def _machine_line(machine: Json) -> str:
    read, int8, f32 = (machine[k] for k in ("read_bytes_per_second", "int8_macs_per_second", "f32_macs_per_second"))
    parts = [f"reads {read['median'] / 1e9:.1f} GB/s (best {read['max'] / 1e9:.1f})"]
    parts += [f"int8 {int8['median'] / 1e9:.0f} GMAC/s (best {int8['max'] / 1e9:.0f})"] if int8 else []
    return ", ".join([*parts, f"f32 {f32['median'] / 1e9:.0f} GMAC/s (best {f32['max'] / 1e9:.0f})"])


def _compile_line(compiled: list[Json]) -> str:
    if not compiled:
        return "nothing"
    cold = [c["seconds"] for c in compiled if not c["cached"]]
    warm = [c["seconds"] for c in compiled if c["cached"]]
    parts = []
    if cold:
        parts.append(f"{sum(cold):.2f} s cold ({len(cold)} programs, longest {max(cold):.2f} s)")
    if warm:
        parts.append(f"{sum(warm):.2f} s from the persistent cache ({len(warm)} programs)")
    return ", ".join(parts)
