"""The report of an audit as tables, lines and a page."""

from pathlib import Path

from rich.table import Table

from specsparse.report import pages
from specsparse.support import tables
from specsparse.support.files import Json, write_atomically
from specsparse.tools.audit.same_bits import FAILED, WRONG, Rate
from specsparse.tools.audit.widths_figure import case_name, state, widths

_MOST_GROUPS = 6
HEADS = ("engine", "weights", "threads", "flash", "verdict", "groups of widths", "other bits from", "forks from",
         "largest difference", "forks in 1,000 at worst", "perplexity (ours)")  # fmt: skip
GROUP_HEADS = ("case", "widths", "", "rows with other bits", "largest difference", "forks in 1,000",
               "widest margin", "first fork", "KL to ours, nats")  # fmt: skip


def spans(widths: list[int], among: list[int]) -> str:
    """Widths in words: those that follow one another among all that were asked are a span, `1-8,12`."""
    order, out = sorted(among), []
    places = [order.index(w) for w in sorted(widths)]
    begin = 0
    for i, place in enumerate(places):
        if i + 1 == len(places) or places[i + 1] != place + 1:
            first, last = order[places[begin]], order[place]
            out.append(str(first) if first == last else f"{first}-{last}")
            begin = i + 1
    return ",".join(out)


def _asked(report: Json) -> list[int]:
    return sorted({1, *report["plan"]["widths"]})


def _least(groups: list[Json]) -> str:
    return str(min(min(group["widths"]) for group in groups)) if groups else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value else "0"


def cells(case: Json, asked: list[int]) -> list[str]:
    """A case under `HEADS`; `asked` are the widths of the audit."""
    wrong = [group for group in case["groups"] if group["wrong"]]
    sound = [group for group in case["groups"] if not group["wrong"]]
    verdict = f"{WRONG} from {_least(wrong)}" if case["verdict"] == WRONG and wrong else case["verdict"]
    named = [spans(group["widths"], asked) for group in case["groups"]]
    more = f" | .. ({len(named)} groups)" if len(named) > _MOST_GROUPS else ""
    worst = max(sound, key=lambda g: g["fork_rate"]["per_1000"], default=None)
    check = case["check"] and case["check"]["one_row"]
    return [
        case["engine"], case["weights"], str(case["threads"]), {None: "-", True: "on", False: "off"}[case["flash"]],
        verdict, " | ".join(named[:_MOST_GROUPS]) + more if named else "-",
        _least([group for group in sound if not group["same_bits"]]),
        _least([group for group in sound if group["flips_count"]]),
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
                case_name(case), spans(group["widths"], _asked(report)), state(group),
                f"{group['rows_differing']} of {group['positions']}", _number(group["largest_difference"]),
                str(Rate(**group["fork_rate"])), "-" if margin is None else f"{margin:.3f}",
                "-" if first is None else f"{first[1] + 1} ({first[0]})",
                "-" if not group["check"] else f"{group['check']['kl']:.4f}",
            ])  # fmt: skip
    return out


def cases_table(report: Json) -> Table:
    """A line a case."""
    made = tables.new(*HEADS, left=(0, 1, 3, 4, 5))
    for case in report["cases"]:
        made.add_row(*cells(case, _asked(report)))
    return made


def groups_table(report: Json) -> Table | None:
    """A line a group of widths; None if every case has one."""
    rows = group_rows(report)
    made = tables.new(*GROUP_HEADS, left=(0, 1, 2))
    for row in rows:
        made.add_row(*row)
    return made if rows else None


def lines(report: Json) -> list[str]:
    """What the tables do not say: the rows, failures, and whether the bits of one row depend on the setting."""
    plan, cases = report["plan"], report["cases"]
    rows = plan["windows"] * plan["tokens"]
    whose = "the engine's own greedy text, one row at a time" if plan["greedy"] else "the real text"
    out = [
        f"{rows} rows a width: {plan['windows']} windows of {plan['tokens']} tokens of {whose}, behind "
        f"{plan['prompt_tokens']} tokens of real text; a fork is a row whose most likely token is another one",
        *(f"{case_name(case)}: {case['failed']}" for case in cases if case["verdict"] == FAILED),
    ]
    if not report.get("complete", True):
        out.append(f"stopped: {len(cases)} cases were done, and not all that were asked")
    for case in cases:
        if case["verdict"] == WRONG and not case["groups"]:
            out.append(f"{case_name(case)}: its perplexity is not the model's, so nothing is said of its forks")
    for engine, file in dict.fromkeys((case["engine"], case["file"]) for case in cases):
        own = [c for c in cases if (c["engine"], c["file"]) == (engine, file) and c["one_row_bits"]]
        kinds = {c["one_row_bits"] for c in own}
        if len(own) > 1:
            said = "the same bits" if len(kinds) == 1 else f"{len(kinds)} kinds of bits"
            out.append(f"{engine}, {own[0]['weights']}: one row at a time has {said} in its {len(own)} settings")
    return out


def write_page(report: Json, path: Path) -> None:
    """The audit as one HTML file that needs nothing beside it.

    Raises:
        UserError: it cannot be written.
    """
    cpu, git = report["manifest"].get("cpu") or {}, report["manifest"].get("git") or {}
    engines = dict.fromkeys(f"{case['engine']} ({case['version']})" for case in report["cases"])
    facts = {"model": report["plan"]["model"], "machine": cpu.get("model"), "date": report["manifest"].get("date"),
             "commit": str(git.get("commit") or "")[:10], "engines": ", ".join(engines)}  # fmt: skip
    text = pages.render(
        "audit.html", title="Does a verification of n rows give the bits of one row?",
        facts=[(key, str(value)) for key, value in facts.items() if value], heads=HEADS,
        rows=[cells(case, _asked(report)) for case in report["cases"]], group_heads=GROUP_HEADS,
        group_rows=group_rows(report), figure=widths(report), lines=lines(report),
    )  # fmt: skip
    write_atomically(path, text)
