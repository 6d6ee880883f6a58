"""Which widths of a batch share the bits of one row, from `audit`."""

from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch

from specsparse.report import plots
from specsparse.report.plots import Figure, Row
from specsparse.support.files import Json

STATES = {
    "bits of one row": "#009E73",
    "other bits, same tokens": "#56B4E9",
    "another token": "#D55E00",
    "wrong logits": "#4D4D4D",
}


def state(group: Json) -> str:
    """What a group of widths came to, a key of `STATES`."""
    if group["wrong"]:
        return "wrong logits"
    if group["same_bits"]:
        return "bits of one row"
    return "another token" if group["flips_count"] else "other bits, same tokens"


def case_name(case: Json) -> str:
    """Engine and setting."""
    parts = [case["engine"], case["weights"], f"{case['threads']} thread{'s' * (case['threads'] != 1)}"]
    return ", ".join(parts + ([] if case["flash"] is None else [f"flash {'on' if case['flash'] else 'off'}"]))


def widths(report: Json) -> Figure:
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
    lines = len({row["case"] for row in rows}) or 1
    title = "Widths that have the bits of one row"
    return Figure("widths", title, caption, rows, _cells, size=(10.0, 1.2 + 0.32 * lines))


def _cells(canvas: Canvas, rows: Sequence[Row]) -> None:
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
