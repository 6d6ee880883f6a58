"""`audit --routing`: whether a row's experts depend on the rows beside it, and on the engine that chooses them.

Rows are those of real text, the same for all engines and widths.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
from rich.console import Console
from rich.table import Table

from specsparse import kernels
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import refuse
from specsparse.measure import manifest
from specsparse.measure.trials import need_room
from specsparse.models import catalogue
from specsparse.runtime.load import load
from specsparse.support import tables, terminal
from specsparse.support.files import Json
from specsparse.tools.audit.same_bits import AuditPlan, AuditWindow, windows_of
from specsparse.tools.peers.logits import OURS, OurRows, RowRouting, filled, text_ids
from specsparse.tools.peers.peer import Peer


def apart(a: RowRouting, b: RowRouting) -> Json:
    """How far two routings of the same rows are apart in each layer, a list a figure.

    Returns:
        "rows_differing", rows with another expert, another order or other bits of a weight, and "experts_differing",
        those of them with other experts or another order; "overlap", the mean part of a row's experts that both chose;
        "weights", the mean distance of a row's weights, half the sum of their differences over all experts: 1 if no
        expert is in common and weights add up to 1; and "largest" of those.
    """
    same = a.experts == b.experts
    same_bits = same & (a.weights.view(np.uint32) == b.weights.view(np.uint32))
    count = max(int(a.experts.max()), int(b.experts.max())) + 1
    dense = np.zeros((2, *a.experts.shape[:2], count))
    for side, one in zip(dense, (a, b), strict=True):
        np.put_along_axis(side, one.experts.astype(np.int64), one.weights, axis=2)
    both = (a.experts[..., :, None] == b.experts[..., None, :]).any(axis=3).mean(axis=2)
    distance = np.abs(dense[0] - dense[1]).sum(axis=2) / 2
    return {
        "rows_differing": (~same_bits.all(axis=2)).sum(axis=1).tolist(),
        "experts_differing": (~same.all(axis=2)).sum(axis=1).tolist(), "overlap": both.mean(axis=1).tolist(),
        "weights": distance.mean(axis=1).tolist(), "largest": distance.max(axis=1).tolist(),
    }  # fmt: skip


def run(plan: AuditPlan, out: Console) -> Json:
    """Compares on real text; neither threads, types, flash attention nor greedy texts of the plan count.

    Returns:
        "rows" that were compared in each layer, and in "engines" by name "widths", each width beside one row at a time
        (see `apart`), and of a peer "ours", one row at a time beside ours.
    """
    peers, widths = [name for name in plan.engines if name != OURS], sorted({*plan.widths} - {1})
    refuse({"--widths: give one above 1": not widths})
    for name in peers:
        Peer(name, option="--engine").close()  # first: a missing package costs no time
    path = catalogue.resolve(plan.model)
    config = ModelConfig.from_gguf(open_gguf(path))
    refuse({"--routing is for models with experts: this one has none": not config.n_experts}, path.name)
    need_room(config, plan.room, "--tokens, --prompt-tokens or --widths")
    with terminal.busy(out, f"loading {path.name}"):
        model = load(path)
    ids, bos = text_ids(model.tokenizer, plan.text), model.tokenizer.bos_id if model.tokenizer.add_bos else None
    cut = windows_of(ids, plan.windows, prompt=plan.prompt_tokens, following=plan.tokens, bos=bos)
    ours, found = OurRows(model, plan.room), dict[str, Json]()
    alone = routing_of(ours, cut, 1)
    for name in (OURS, *peers):
        engine = ours if name == OURS else Peer(name, option="--engine", patient=True)
        with closing(engine):
            if isinstance(engine, Peer):
                engine.load(path, threads=int(kernels.status()["threads"] or 1), room=plan.room, flash=None)
            one = alone if name == OURS else routing_of(engine, cut, 1)
            by_width = {str(width): apart(one, routing_of(engine, cut, width)) for width in widths}
            beside = {} if name == OURS else {"ours": apart(alone, one)}
            found[name] = {"version": engine.version, "widths": by_width, **beside}
    return {
        "audit": "specsparse audit routing", "version": 1, "model": path.name, "rows": plan.windows * plan.tokens,
        "experts": config.n_experts, "chosen": config.n_chosen, "engines": found,
        "manifest": manifest.build({}, path),
    }  # fmt: skip


def routing_of(engine: OurRows | Peer, cut: Sequence[AuditWindow], width: int) -> RowRouting:
    """The routing of all windows' rows, each computed in a batch of exactly `width`."""
    each = [engine.routing(w.prompt, filled(w.following, width), width) for w in cut]
    rows = [RowRouting(*(part[:, : len(w.following)] for part in found)) for w, found in zip(cut, each, strict=True)]
    return RowRouting(*(np.concatenate(parts, axis=1) for parts in zip(*rows, strict=True)))


def differing(engine: Json, what: str = "rows_differing") -> int:
    """Rows of any layer and width that are not as one row at a time, by that figure of `apart`."""
    return sum(sum(width[what]) for width in engine["widths"].values())


def parts(report: Json) -> Iterator[Table | str]:
    """A table of layers for each peer, and a line an engine."""
    for name, engine in report["engines"].items():
        if "ours" in engine:
            ours, by_width = engine["ours"], [width["rows_differing"] for width in engine["widths"].values()]
            columns = ("overlap", "weights apart", "at most", "rows that depend on the width")
            note = (
                f"of {report['rows']} rows, one row at a time, beside ours: mean part of a row's experts that both "
                "chose, half the sum of the differences of their weights"
            )
            most = map(max, zip(*by_width, strict=True))
            each = zip(ours["overlap"], ours["weights"], ours["largest"], most, strict=True)
            yield tables.new(f"{name}, layer", *columns, note=note, rows=(
                (str(i), f"{overlap:.4f}", f"{mean:.2g}", f"{largest:.2g}", str(count))
                for i, (overlap, mean, largest, count) in enumerate(each)
            ))  # fmt: skip
            mean = float(np.mean(ours["overlap"]))
            yield f"{name} ({engine['version']}) chooses {mean:.4f} of the experts that ours does"
        count, widths = differing(engine), ", ".join(engine["widths"])
        said, others = "have no bit that differs", differing(engine, "experts_differing")
        if count:
            rows = report["rows"] * sum(len(width["overlap"]) for width in engine["widths"].values())
            said = f"differ in {count} of {rows} rows of all layers (the experts in {others}, else bits of weights)"
        yield f"{name}: experts and weights in batches of {widths} rows {said} from one row at a time"
