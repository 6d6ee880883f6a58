"""The output of a run in the terminal: the text as it comes, one table, llama.cpp's timing lines."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from specsparse.measure import conditions, intervals
from specsparse.measure.conditions import Conditions
from specsparse.measure.intervals import Interval
from specsparse.measure.speedups import Repeats, Speedup
from specsparse.report.record import SPECULATIVE, RunRecord, rows
from specsparse.runtime import metrics
from specsparse.support import tables

_MAX_TASK_COLUMNS = 8
_BY_TASK = {
    "plain, tok/s": "plain, tok/s", "speculative, tok/s": "speculative", "speed-up": "speed-up",
    "tokens per target pass": "tokens per pass", "mean acceptance length": "acceptance length",
    "  accepted at position 1": "position 1",
}  # fmt: skip
"""Headings of the measures in a table with many tasks, which are its rows then."""
_MOST_HEADING = 140


def show_prompt(out: Console, index: int, count: int, task: str, text: str) -> None:
    """The heading over a streamed text: the prompt's first line, cut to fit."""
    first = " ".join(text.split())
    room = max(20, min(out.width, _MOST_HEADING) - len(task) - 16)
    line = Text(f"[{index}/{count}] {task}  ", style="bold cyan")
    out.print(line.append(first if len(first) <= room else first[: room - 1] + "…", style="dim"))


def report(record: RunRecord) -> list[RenderableType]:
    """The tables, the verdict on the text, and the timing lines.

    Measures are rows and tasks columns; many tasks have a table of their own, as its rows.
    """
    method, title, note = record.method, f"{record.name}: plain decoding", None
    if SPECULATIVE in record.groups["all"].sides:
        how = f"{method['drafter']} x {method['verifier']} ({method['label']})"
        title, note = f"{record.name}: {how}, gamma {method['gamma']}", metrics.lengths_note()
    shown: list[RenderableType] = [Text(title, style="bold")]
    if "ffn" in method:
        shown.append(Text(f"ffn {method['ffn']}; {method['ffn_label']}"))
    names = [name for name in record.groups if name != "all"]
    few = names if 1 < len(names) <= _MAX_TASK_COLUMNS else []
    measures = ([label, *cells] for label, cells in rows([record.groups[name] for name in (*few, "all")]))
    shown.append(tables.new("", *few, "all", rows=measures, note=note))
    if len(names) > _MAX_TASK_COLUMNS:
        chief = [(label, cells) for label, cells in rows([record.groups[n] for n in names]) if label in _BY_TASK]
        by_task = ([name, *(cells[i] for _, cells in chief)] for i, name in enumerate(names))
        shown.append(tables.new("task", *(_BY_TASK[label] for label, _ in chief), rows=by_task))
    return [*shown, *verdict_lines(record), *map(Text, record.notes), *timing_lines(record)]


def verdict_lines(record: RunRecord) -> list[Text]:
    """Says whether the text equals plain decoding's, and how much faster the method is."""
    lines = []
    found = record.identity
    if found is not None:
        if found.differing == 0:
            text = f"same text: all {found.tokens} tokens equal plain decoding ({found.counted})"
            lines.append(Text(text, style="green"))
        elif found.promised:
            where = ", ".join(found.prompts_differing)
            text = f"NOT the same text: {found.differing} of {found.tokens} tokens differ from plain decoding ({where})"
            lines.append(Text(f"{text}, counted {found.counted}", style="bold red"))
        else:
            text = f"{found.differing} of {found.tokens} tokens differ from plain decoding ({found.counted})"
            label = record.method["label"]
            keeps = "this verifier keeps the distribution only" if "lossless" in label else label
            lines.append(Text(f"{text}; {keeps}"))
    faster = record.groups["all"].speedup
    if faster is not None:
        lines += [Text(line) for line in _speedup_lines(faster)]
        if record.groups["all"].sides[SPECULATIVE].rates["share_draft"] is None:
            lines.append(Text("time in draft, verify, sample and commit: not measured in this run"))
    return lines + condition_lines(record.conditions, record.repeats, record.warnings)


def condition_lines(
    taken: Conditions | None, repeats: Repeats | None = None, warnings: Sequence[str] | None = None
) -> list[Text]:
    """The conditions of a timing, why it was not repeated more often, and doubts of it.

    Without `warnings` the doubts are those of the conditions alone; `taken` None: nothing was timed.
    """
    if taken is None:
        return []
    said = [taken.line(), repeats.line() if repeats else ""]
    doubts = conditions.doubts(taken, {}) if warnings is None else warnings
    return [*(Text(line) for line in said if line), *(Text(line, style="yellow") for line in doubts)]


def _speedup_lines(faster: Speedup) -> list[str]:
    pairs = f", {faster.pairs} pairs" if faster.pairs > faster.prompts else ""
    what = "plain / speculative decode time in total, same prompts and tokens, interleaved"
    lines = [f"speed-up {faster.ratio_of_totals:.2f} ({faster.interval.sentence()}{pairs}): {what}"]
    if faster.low is not None:
        share = intervals.unseen(faster.prompts)
        lines.append(
            f"that is for prompts like these {faster.prompts}: a kind that makes up {share:.0%} of all is in none of "
            "them 1 time in 20"
        )
    if faster.prompts > 1:
        middle = Interval(faster.geometric_mean, faster.geometric_low, faster.geometric_high, faster.prompts)
        lines.append(
            f"geometric mean of the prompts' speed-ups {middle.value:.2f} ({middle.sentence()}); "
            f"mean of the ratios {faster.mean_of_ratios:.2f}"
        )
    return lines


def timing_lines(record: RunRecord) -> list[Text]:
    """As llama.cpp prints them, for each side."""

    def line(label: str, seconds: float, tokens: int | None = None) -> Text:
        text = f"{label:>18} = {1e3 * seconds:10.2f} ms"
        if tokens:
            rate = f"{tokens / seconds:9.2f}" if seconds else "        -"
            each = f"{1e3 * seconds / tokens:8.2f} ms per token"
            text = f"{text} / {tokens:6d} tokens ({each}, {rate} tokens per second)"
        return Text(text)

    lines = [line("load time", record.load_s)]
    if record.compile_s:
        lines.append(line("compile time", record.compile_s))
    for name, side in record.groups["all"].sides.items():
        c = side.counters
        lines.append(Text(name, style="bold"))
        lines.append(line("prompt eval time", side.prefill_s, side.prefill_tokens - side.cached_tokens))
        lines.append(line("eval time", side.decode_s, c.num_emitted_tokens))
        if c.times.sample:
            lines.append(line("sample time", c.times.sample, c.num_emitted_tokens))
        lines.append(line("total time", side.prefill_s + side.decode_s))
    return lines
