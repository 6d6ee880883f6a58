"""The report of an audit as tables, lines, a figure and a page."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from rich.console import Console

from specsparse.report import pages, plots
from specsparse.report.plots import Figure, Row
from specsparse.support import tables
from specsparse.support.files import Json, write_atomically
from specsparse.tools.audit.same_bits import FAILED, WRONG, Rate

_MOST_GROUPS = 6
HEADS = ("engine", "weights", "threads", "flash", "verdict", "groups of widths", "other bits from", "forks from",
         "largest difference", "forks in 1,000 at worst", "perplexity (ours)")  # fmt: skip
GROUP_HEADS = ("case", "widths", "", "rows with other bits", "largest difference", "forks in 1,000",
               "widest margin", "first fork", "KL to ours, nats")  # fmt: skip
STATES = {
    "bits of one row": "#009E73", "other bits, same tokens": "#56B4E9", "another token": "#D55E00",
    "wrong logits": "#4D4D4D",
}  # fmt: skip
"""States of a group of widths, and their colours."""


def spans(widths: Sequence[int], among: Sequence[int]) -> str:
    """Widths in words: those that follow one another among all widths are a span, `1-8,12`."""
    order, out = sorted(among), list[list[int]]()
    for width in sorted(widths):
        if out and order.index(width) == order.index(out[-1][-1]) + 1:
            out[-1].append(width)
        else:
            out.append([width])
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in out)


def state(group: Json) -> str:
    if group["wrong"]:
        return "wrong logits"
    if group["same_bits"]:
        return "bits of one row"
    return "another token" if group["flips_count"] else "other bits, same tokens"


def case_name(case: Json) -> str:
    parts = [case["engine"], case["weights"], f"{case['threads']} thread{'s' * (case['threads'] != 1)}"]
    return ", ".join(parts + ([] if case["flash"] is None else [f"flash {'on' if case['flash'] else 'off'}"]))


def _all_widths(report: Json) -> list[int]:
    return sorted({1, *report["plan"]["widths"]})


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value else "0"


def cells(case: Json, widths: list[int]) -> list[str]:
    """A case under `HEADS`; `widths` are those of the audit."""

    def least(groups: list[Json]) -> str:
        return str(min(min(group["widths"]) for group in groups)) if groups else "-"

    wrong = [group for group in case["groups"] if group["wrong"]]
    sound = [group for group in case["groups"] if not group["wrong"]]
    verdict = f"{WRONG} from {least(wrong)}" if case["verdict"] == WRONG and wrong else case["verdict"]
    named = [spans(group["widths"], widths) for group in case["groups"]]
    more = f" | .. ({len(named)} groups)" if len(named) > _MOST_GROUPS else ""
    worst = max(sound, key=lambda g: g["fork_rate"]["per_1000"], default=None)
    check = case["check"] and case["check"]["one_row"]
    return [
        case["engine"], case["weights"], str(case["threads"]), {None: "-", True: "on", False: "off"}[case["flash"]],
        verdict, " | ".join(named[:_MOST_GROUPS]) + more if named else "-",
        least([group for group in sound if not group["same_bits"]]),
        least([group for group in sound if group["flips_count"]]),
        _number(max((group["largest_difference"] for group in sound), default=None)),
        "-" if worst is None else str(Rate(**worst["fork_rate"])),
        "-" if not check else f"{check['perplexity']:.2f} ({check['ours']:.2f})",
    ]  # fmt: skip


def group_rows(report: Json) -> list[list[str]]:
    """The groups of the cases that have several, under `GROUP_HEADS`."""
    out = []
    for case in report["cases"]:
        for group in case["groups"] if len(case["groups"]) > 1 else ():
            first = min(group["first_flips"].items(), key=lambda item: item[1], default=None)
            margin = max((flip["margin"] for flip in group["flips"]), default=None)
            out.append([
                case_name(case), spans(group["widths"], _all_widths(report)), state(group),
                f"{group['rows_differing']} of {group['positions']}", _number(group["largest_difference"]),
                str(Rate(**group["fork_rate"])), "-" if margin is None else f"{margin:.3f}",
                "-" if first is None else f"{first[1] + 1} ({first[0]})",
                "-" if not group["check"] else f"{group['check']['kl']:.4f}",
            ])  # fmt: skip
    return out


def show_tables(report: Json, out: Console) -> None:
    """A line a case, and a line a group of widths if a case has several."""
    cases = [cells(case, _all_widths(report)) for case in report["cases"]]
    both = ((HEADS, (0, 1, 3, 4, 5), 4, cases), (GROUP_HEADS, (0, 1, 2), 2, group_rows(report)))
    for heads, left, names, rows in both:
        if rows:
            tables.show(out, tables.new(*heads, rows=rows, left=left), names=names)


def lines(report: Json) -> Iterator[str]:
    """The rows, failures, and whether the bits of one row depend on the setting."""
    plan, cases = report["plan"], report["cases"]
    whose = "the engine's own greedy text, one row at a time" if plan["greedy"] else "the real text"
    yield (
        f"{plan['windows'] * plan['tokens']} rows a width: {plan['windows']} windows of {plan['tokens']} tokens of "
        f"{whose}, behind {plan['prompt_tokens']} tokens of real text; a fork is a row whose most likely token is "
        "another one"
    )
    yield from (f"{case_name(case)}: {case['failed']}" for case in cases if case["verdict"] == FAILED)
    if not report.get("complete", True):
        yield f"stopped: {len(cases)} cases were done, and not all that were asked"
    for case in cases:
        if case["verdict"] == WRONG and not case["groups"]:
            yield f"{case_name(case)}: its perplexity is not the model's, so nothing is said of its forks"
    for engine, file in dict.fromkeys((case["engine"], case["file"]) for case in cases):
        own = [c for c in cases if (c["engine"], c["file"]) == (engine, file) and c["one_row_bits"]]
        kinds = {c["one_row_bits"] for c in own}
        if len(own) > 1:
            said = "the same bits" if len(kinds) == 1 else f"{len(kinds)} kinds of bits"
            yield f"{engine}, {own[0]['weights']}: one row at a time has {said} in its {len(own)} settings"


def figure(report: Json) -> Figure:
    """A line a case, a cell a width: its state, and how often decoding forks there."""
    rows = tuple(
        {"case": case_name(case), "width": width, "state": state(group), "group": i + 1,
         "value": group["fork_rate"]["per_1000"], "low": group["fork_rate"]["low"], "high": group["fork_rate"]["high"]}
        for case in report["cases"] for i, group in enumerate(case["groups"]) for width in group["widths"]
    )  # fmt: skip
    caption = (
        "Rows of a batch from left to right. A letter is a group of widths whose logits have the same bits. Value, low "
        "and high: tokens that decoding would write otherwise, for each thousand, and their 95 % interval."
    )
    height = 1.2 + 0.32 * (len({row["case"] for row in rows}) or 1)
    return Figure("widths", "Widths that have the bits of one row", caption, rows, _draw_widths, size=(10.0, height))


def _draw_widths(canvas: Canvas, rows: Sequence[Row]) -> None:
    axes, cases, order = canvas.subplots(), plots.distinct(rows, "case"), sorted(plots.distinct(rows, "width"))
    for row in rows:
        x, y = order.index(row["width"]), len(cases) - 1 - cases.index(row["case"])
        axes.bar(x, 0.86, 0.94, y - 0.43, color=STATES[row["state"]])
        letter = chr(ord("a") + row["group"] - 1) if row["group"] <= 26 else "."
        axes.text(x, y, letter, ha="center", va="center", color="white", fontsize=7)
    axes.set_xticks(range(len(order)), [str(w) for w in order], fontsize=7)
    axes.set_yticks(range(len(cases)), [str(c) for c in reversed(cases)], fontsize=8)
    axes.set(xlabel="rows of a batch", xlim=(-0.6, len(order) - 0.4), ylim=(-0.6, max(len(cases) - 0.4, 0.6)))
    axes.grid(visible=False)
    present = plots.distinct(rows, "state")
    handles = [Patch(color=colour, label=name) for name, colour in STATES.items() if name in present]
    canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1)


def write_page(report: Json, path: Path) -> None:
    """The audit as one HTML file that needs nothing beside it; UserError if it cannot be written."""
    cpu, git = report["manifest"].get("cpu") or {}, report["manifest"].get("git") or {}
    engines = dict.fromkeys(f"{case['engine']} ({case['version']})" for case in report["cases"])
    facts = {"model": report["plan"]["model"], "machine": cpu.get("model"), "date": report["manifest"].get("date"),
             "commit": str(git.get("commit") or "")[:10], "engines": ", ".join(engines)}  # fmt: skip
    text = pages.render(
        "audit.html", title="Does a verification of n rows give the bits of one row?",
        facts=[(key, str(value)) for key, value in facts.items() if value], heads=HEADS,
        rows=[cells(case, _all_widths(report)) for case in report["cases"]], group_heads=GROUP_HEADS,
        group_rows=group_rows(report), figure=figure(report), lines=[*lines(report)],
    )  # fmt: skip
    write_atomically(path, text)
