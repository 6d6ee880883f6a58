"""A speculative run round by round, as one would explain it: in the terminal, and as a line of JSON a round."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from specsparse.runtime.stepped import RoundView
from specsparse.support.files import Json, append_line, to_json, write_atomically

TRACE_FILE = "trace.jsonl"
_SHOWN = 48
"""Prompt ids shown in the terminal; the file has all."""


def explain_round(view: RoundView, b: int = 0) -> Json:
    """What happened to sequence b, as plain values. Placeholders are -1.

    `target_ids` is what the target itself draws at each row with the noise of its position (what plain decoding would
    write there), `target_p` their probabilities; `p` is the target's law at each proposed token, `q` the draft's.
    """
    draft, verdict = view.draft, view.verdict
    count, K = int(draft.count[b]), draft.max_nodes
    tokens, parents = np.asarray(draft.tokens[b])[:count], np.asarray(draft.parents[b])[:count]
    p_nV, targets_n = np.asarray(view.laws()[b]), np.asarray(view.targets()[b])
    rows = [0, *(1 + i for i in range(count))]
    q = np.ones(count) if draft.q is None else np.asarray(draft.q[b])[np.arange(count), tokens]
    accepted = {int(n) for n in np.asarray(verdict.nodes[b]) if n >= 0}
    emitted = np.full(K + 1, -1, np.int64)
    new = int(view.after.length[b]) - int(view.before.length[b])
    start = int(view.before.length[b])
    emitted[:new] = np.asarray(view.after.tokens[b])[start : start + new]
    last = int(verdict.tokens[b, int(verdict.accepted[b])])
    whole = count > 0 and int(verdict.tested[b]) == int(verdict.accepted[b])
    return {
        "round": view.number,
        "position": start,
        "proposal_ids": tokens.tolist(),
        "parents": parents.tolist(),
        "q": q.tolist(),
        "p": [float(p_nV[parent + 1, token]) for parent, token in zip(parents, tokens, strict=True)],
        "target_ids": targets_n[rows].tolist(),
        "target_p": [float(p_nV[row, max(targets_n[row], 0)]) for row in rows],
        "accepted": [i in accepted for i in range(count)],
        "bonus" if whole or not count else "recovered": last,
        "emitted": emitted.tolist(),
        "cache_before": int(view.cache_before[b]),
        "cache_after": int(view.cache_after[b]),
    }


class Trace:
    """Prints rounds and writes them to a file of JSON lines, made anew."""

    def __init__(self, path: Path, out: Console):
        self._file, self._out, self._prompt, self._begun = path, out, "", False
        write_atomically(path, "")

    def start(self, prompt_id: str) -> None:
        """The next prompt."""
        self._prompt, self._begun = prompt_id, False

    def round(self, view: RoundView) -> None:
        """One round of the first sequence."""
        decode = view.session.model.tokenizer.decode
        if not self._begun:
            self._begun = True
            ids = [int(t) for t in view.session.sequences[0].prompt]
            self._write({"prompt_id": self._prompt, "prompt_ids": ids})
            more = f" ... {len(ids)} in all" if len(ids) > _SHOWN else ""
            self._line("prompt ids", f"{ids[:_SHOWN]}{more}")
        found = explain_round(view)
        self._write({"prompt_id": self._prompt, **found})
        cache = f"cache {found['cache_before']} -> {found['cache_after']}"
        self._out.print(Text(f"round {found['round']}  position {found['position']}  {cache}", style="bold"))

        def named(ids: Sequence[int], *numbers: tuple[str, Sequence[float]]) -> str:
            cells = []
            for i, token in enumerate(ids):
                text = repr(decode([token], skip_special=False)) if token >= 0 else "none"
                cells.append(" ".join([f"{token} {text}", *(f"{name} {of[i]:.3g}" for name, of in numbers)]))
            return "  |  ".join(cells) or "nothing"

        proposal = found["proposal_ids"]
        self._line("proposal", named(proposal, ("q", found["q"]), ("p", found["p"])))
        if found["parents"] != list(range(-1, len(proposal) - 1)):
            self._line("parents", str(found["parents"]))
        self._line("target", named(found["target_ids"], ("p", found["target_p"])))
        self._line("accepted", str([int(a) for a in found["accepted"]]))
        kind = "bonus" if "bonus" in found else "recovered"
        self._line(kind, named([found[kind]]))
        self._line("emitted", str(found["emitted"]))

    def _line(self, name: str, text: str) -> None:
        self._out.print(Text(f"  {name:<10} ", style="dim").append(text, style="not dim"), soft_wrap=True)

    def _write(self, row: Json) -> None:
        append_line(self._file, to_json(row))
