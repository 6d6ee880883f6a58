"""Rounds that are watched: traced as one would explain them, and their distributions recorded in a file.

`Trace` prints rounds and writes a line of JSON for each. `Recorder` keeps the likeliest tokens of p and q at every
drafted node and the mass beyond them, as a `Recording`, which `specsparse replay` judges again.

A row of a round is a position the target judged: row 0 follows the last committed token, row 1+i follows node i. Each
row keeps `ids`: the likeliest tokens of p and of the distribution its children were drawn from, and the children
themselves. Both distributions are kept at those ids and as one number for the rest.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from specsparse.errors import UserError
from specsparse.runtime.loops import RoundView, round_of
from specsparse.speculative.base import ROOT, DraftKind
from specsparse.support.files import Json, append_line, atomically, read_npz, to_json, write_atomically

LAWS_FILE, TRACE_FILE = "laws.npz", "trace.jsonl"
VERSION = 1
_REAL = ("coins", "p", "p_rest", "q", "q_rest")
_ROUNDING = 1e-2  # most that the sum of a distribution in float32 may be off


@dataclasses.dataclass(frozen=True)
class Recording:
    """R rounds of drafts of up to K nodes, W ids a row; -1 fills a row of fewer."""

    about: Json  # verifier, kind of draw, tree, temperature and the like of the run
    prompt: np.ndarray  # int32[R], index in `about["prompts"]`
    position: np.ndarray  # int32[R], length of the text before the round
    count: np.ndarray  # int32[R], of the draft
    accepted: np.ndarray  # int32[R], of the verdict
    tested: np.ndarray  # int32[R], of the verdict
    tokens: np.ndarray  # int32[R, K]
    parents: np.ndarray  # int32[R, K]
    targets: np.ndarray  # int32[R, K+1], the target's own draw at each row
    coins: np.ndarray  # float32[R, K], the run's acceptance coins
    ids: np.ndarray  # int32[R, K+1, W]
    p: np.ndarray  # float32[R, K+1, W]
    p_rest: np.ndarray  # float32[R, K+1]
    # float32[R, K, W], the distribution of node i at its parent row's ids; None for one-hot drafts
    q: np.ndarray | None = None
    q_rest: np.ndarray | None = None  # float32[R, K]

    def __len__(self) -> int:
        return len(self.count)

    def save(self, path: Path) -> None:
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "about"}
        with atomically(path) as file:
            np.savez_compressed(
                file,
                about=np.array(json.dumps({**self.about, "version": VERSION})),
                **{name: array for name, array in arrays.items() if array is not None},
            )

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """Reads a file, or the one in a run's directory. UserError: no such file, or it is not a recording."""
        file = path / LAWS_FILE if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{file}: no such file; a run with record_laws=32 writes it")
        given = read_npz(file)
        try:
            about = json.loads(str(given.pop("about")))
            if about.pop("version") != VERSION:
                raise ValueError("another version")
            read = cls(about, **given)
            read.check()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{file}: not a recording of distributions ({error}); a run with record_laws=32 writes one"
            ) from None
        return read

    def check(self) -> None:
        """Raises ValueError or LookupError if a fact is missing or an array is not what it should be."""
        about, R, K, W = self.about, len(self.count), self.tokens.shape[-1], self.ids.shape[-1]
        DraftKind(about["kind"])
        right = {
            "tree": isinstance(about["tree"], bool),
            "truncated": isinstance(about["truncated"], bool),
            "verifier": isinstance(about["verifier"], str),
            "prompts": isinstance(about["prompts"], list),
            "depth": type(about["depth"]) is int and about["depth"] >= 1,
            "vocab": type(about["vocab"]) is int and about["vocab"] >= 1,
            "temperature": isinstance(about["temperature"], int | float) and 0 <= about["temperature"] < math.inf,
            "number of rounds": R > 0,
            "q": (self.q is None) == (self.q_rest is None),
        }
        shapes = {
            **dict.fromkeys(("prompt", "position", "count", "accepted", "tested"), (R,)),
            **dict.fromkeys(("tokens", "parents", "coins", "q_rest"), (R, K)),
            **dict.fromkeys(("targets", "p_rest"), (R, K + 1)),
            **dict.fromkeys(("ids", "p"), (R, K + 1, W)),
            "q": (R, K, W),
        }
        for name, shape in shapes.items():
            array, real = getattr(self, name), name in _REAL
            if array is None and name in ("q", "q_rest"):
                continue
            right[name] = right.get(name, True) and (array.shape, array.dtype.kind) == (shape, "f" if real else "i")
            if right[name] and real:
                right[name] = bool(((array >= 0) & (array <= 1 + _ROUNDING)).all())
        if not all(right.values()):
            raise ValueError(f"its {next(name for name, good in right.items() if not good)} is not right")
        count = self.count[:, None]
        if not ((self.count >= 0) & (self.count <= K) & (self.accepted >= 0) & (self.accepted <= self.count)).all():
            raise ValueError("count or accepted is out of range")
        node, row = np.arange(K) < count, np.arange(K + 1) <= count
        if (node & ((self.parents < ROOT) | (self.parents >= np.arange(K)))).any():
            raise ValueError("a node does not follow its parent")
        depths = np.zeros((R, K + 1), np.int64)  # of rows; those without a node stay at 0
        for i in range(K):
            above = depths[np.arange(R), np.where(node[:, i], self.parents[:, i] + 1, 0)]
            depths[:, i + 1] = np.where(node[:, i], above + 1, 0)
        if not depths.max() <= about["depth"] <= max(K, 1):
            raise ValueError("its nodes are deeper than the drafts, or the drafts than their nodes")
        if (row & (abs(self.p.sum(axis=2, dtype=np.float64) + self.p_rest - 1) > _ROUNDING)).any():
            raise ValueError("p is no distribution")


class Recorder:
    """Gathers the rounds of the first sequence of each prompt, with the `top` likeliest tokens of each row."""

    def __init__(self, top: int):
        self.top = top
        self._prompts: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._about: Json = {}

    def start(self, prompt_id: str) -> None:
        self._prompts.append(prompt_id)

    def round(self, view: RoundView) -> None:
        if not self._about:
            stages, params = round_of(view.session), view.session.sequences[0].params
            sampling = stages.config
            self._about = {
                "kind": stages.drafter.kind.value,
                "tree": stages.drafter.tree,
                "depth": stages.drafter.max_depth,
                "verifier": stages.verifier.name,
                "vocab": sampling.vocab_size,
                "top": self.top,
                "temperature": 0.0 if params.greedy else params.temperature,
                "truncated": bool(sampling.use_min_p or sampling.use_top_k or sampling.use_top_p),
            }
        draft, verdict, p_nV = view.draft, view.verdict, np.asarray(view.probs()[0])
        tokens, parents = np.asarray(draft.tokens[0]), np.asarray(draft.parents[0])
        q_KV = None if draft.q is None else np.asarray(draft.q[0])
        count, K = int(draft.count[0]), draft.max_nodes
        width = min(p_nV.shape[1], 2 * self.top + K)
        row: dict[str, Any] = {
            "prompt": len(self._prompts) - 1,
            "position": int(view.before.length[0]),
            "count": count,
            "accepted": int(verdict.accepted[0]),
            "tested": int(verdict.tested[0]),
            "tokens": tokens,
            "parents": parents,
            "targets": np.asarray(view.targets()[0]),
            "coins": view.coins()[0],
            "ids": np.full((K + 1, width), -1, np.int32),
            "p": np.zeros((K + 1, width), np.float32),
            "p_rest": np.zeros(K + 1, np.float32),
        }
        if q_KV is not None:
            row |= {"q": np.zeros((K, width), np.float32), "q_rest": np.zeros(K, np.float32)}
        for at in range(count + 1):
            children = [i for i in range(count) if parents[i] == at - 1]
            q_V = q_KV[children[0]] if children and q_KV is not None else None
            likeliest = [_likeliest(probs, self.top) for probs in (p_nV[at], q_V) if probs is not None]
            unique = dict.fromkeys(np.concatenate([tokens[children], *likeliest]).tolist())  # children must be there
            ids = np.array(list(unique)[:width], np.int32)
            row["ids"][at, : len(ids)] = ids
            row["p"][at, : len(ids)], row["p_rest"][at] = _at(p_nV[at], ids)
            if q_KV is not None:
                for i in children:
                    row["q"][i, : len(ids)], row["q_rest"][i] = _at(q_KV[i], ids)
        self._rows.append(row)

    def recording(self) -> Recording:
        """All rounds so far; UserError if there were none."""
        if not self._rows:
            raise UserError("no speculative round was recorded")
        stacked = {name: np.stack([row[name] for row in self._rows]) for name in self._rows[0]}
        arrays = {k: v.astype(np.int32) if v.dtype.kind == "i" else v for k, v in stacked.items()}
        return Recording({**self._about, "prompts": self._prompts}, **arrays)


def _likeliest(probs_V: np.ndarray, top: int) -> np.ndarray:
    if top >= probs_V.shape[0]:
        return np.arange(probs_V.shape[0])
    found = np.argpartition(-probs_V, top)[:top]
    return found[probs_V[found] > 0]


def _at(probs_V: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """The distribution at the ids, and the mass of all other ids."""
    kept = probs_V[ids]
    return kept, max(0.0, float(probs_V.sum(dtype=np.float64) - kept.sum(dtype=np.float64)))


_SHOWN = 48  # prompt ids shown in the terminal; the file has all


def explain_round(view: RoundView) -> Json:
    """The round of the first sequence as plain values. Placeholders are -1.

    `target_ids` is what the target itself draws at each row with the noise of its position (what plain decoding would
    write there), `target_p` their probabilities; `p` is the target's probability of each proposed token, `q` that of
    the draft.
    """
    draft, verdict = view.draft, view.verdict
    count, K = int(draft.count[0]), draft.max_nodes
    tokens, parents = np.asarray(draft.tokens[0])[:count], np.asarray(draft.parents[0])[:count]
    p_nV, targets_n = np.asarray(view.probs()[0]), np.asarray(view.targets()[0])
    rows = [0, *(1 + i for i in range(count))]
    q = np.ones(count) if draft.q is None else np.asarray(draft.q[0])[np.arange(count), tokens]
    accepted = {int(n) for n in np.asarray(verdict.nodes[0]) if n >= 0}
    emitted = np.full(K + 1, -1, np.int64)
    new = int(view.after.length[0]) - int(view.before.length[0])
    start = int(view.before.length[0])
    emitted[:new] = np.asarray(view.after.tokens[0])[start : start + new]
    last = int(verdict.tokens[0, int(verdict.accepted[0])])
    whole = count > 0 and int(verdict.tested[0]) == int(verdict.accepted[0])
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
        "cache_before": int(view.cache_before[0]),
        "cache_after": int(view.cache_after[0]),
    }


class Trace:
    """Prints rounds and writes them to a file of JSON lines, made anew."""

    def __init__(self, path: Path, out: Console):
        self._file, self._out, self._prompt, self._begun = path, out, "", False
        write_atomically(path, "")

    def start(self, prompt_id: str) -> None:
        self._prompt, self._begun = prompt_id, False

    def round(self, view: RoundView) -> None:
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
