"""Claim: with `greedy` and `match` speculative decoding writes the tokens of plain decoding, on a real model too.

Expected: 0 differing tokens of 100,000, drafts accepted and refused by every method; exit code 1 otherwise.
Temperatures 0, 0.6 and 1.0, top-k, top-p, min-p and penalties, chains of 1 to 8 tokens and trees, every drafter that
needs no second file. A batch is eight prompts, each with sampling parameters, a noise and a draft length of its own, so
that few programs serve all of it; plain decoding of the same batch is done once and kept.
Run time: about twenty minutes for SmolLM2-135M on two cores. What is done is kept in --state: a second call goes on.
Command: python experiments/identity.py --tokens 100000
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import specsparse
from specsparse.errors import UserError
from specsparse.support.terminal import console, counting
from specsparse.testing.identity import METHODS, PROMPT, ROWS, TEXT, IdentityBench, IdentityUnit, units


class State:
    """What is done, one JSON object a line; the first line says for which run.

    Raises:
        UserError: the file belongs to another run.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path, self.plain, self.done = path, {}, {}
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(identity)
            return
        first, *rows = (json.loads(line) for line in path.read_text().splitlines())
        if first != identity:
            raise UserError(f"{path} belongs to another run ({first}): give another --state, or remove it")
        for row in rows:
            if "plain" in row:
                self.plain[tuple(row["plain"])] = np.array(row["tokens"], np.int32)
            else:
                self.done[IdentityUnit(*row["unit"])] = row

    def add_plain(self, law: str, batch: int, tokens: np.ndarray) -> None:
        self.plain[law, batch] = tokens
        self._write({"plain": [law, batch], "tokens": tokens.tolist()})

    def add(self, unit: IdentityUnit, row: dict[str, int]) -> None:
        self.done[unit] = row
        self._write({"unit": list(unit), **row})

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as f:
            f.write(json.dumps(row) + "\n")


def run(bench: IdentityBench, state: State, todo: list[IdentityUnit], *, seconds: float) -> Iterator[IdentityUnit]:
    """Does what is left of `todo` until the time is over, and yields each unit that is done."""
    start = time.monotonic()
    for unit in todo:
        if unit not in state.done:
            if time.monotonic() - start > seconds:
                return
            if (unit.law, unit.batch) not in state.plain:
                state.add_plain(unit.law, unit.batch, bench.plain(unit.law, unit.batch))
            state.add(unit, bench.compare(unit, state.plain[unit.law, unit.batch]))
        yield unit


def summary(state: State, todo: list[IdentityUnit], tokens: int) -> dict[str, Any]:
    """The figures of the run, by method too."""
    by_method: dict[str, Counter[str]] = {}
    for unit in todo:
        row = state.done.get(unit)
        if row is not None:
            by_method.setdefault(unit.method, Counter()).update({k: v for k, v in row.items() if k != "unit"})
    total = sum(by_method.values(), Counter())
    whole = {"asked": tokens, "tokens": total["tokens"], "differing": total["differing"]}
    return whole | {"complete": total["tokens"] >= tokens, "methods": {name: dict(c) for name, c in by_method.items()}}


def passed(result: dict[str, Any]) -> bool:
    """No token differs, and no method was right or wrong all the time."""
    drafts = result["methods"].values()
    return result["differing"] == 0 and all(0 < c["accepted"] < c["drafted"] for c in drafts)


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="speculative against plain decoding, token by token")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=100_000, help="to compare")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch after them")
    parser.add_argument("--state", type=Path, default=Path("runs/identity.jsonl"), help="what is done so far")
    args = parser.parse_args(given)
    if args.tokens < 1:
        parser.error("--tokens must be at least 1")
    return args


def main(given: list[str] | None = None) -> int:
    args = parse(given)
    todo, out = units(args.tokens, args.methods), console()
    identity = {"version": specsparse.__version__, "model": args.model, "rows": ROWS, "prompt": PROMPT, "text": TEXT}
    try:
        state = State(args.state, identity)
        bench = IdentityBench.of(specsparse.load(args.model))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    with counting(out, "batches", len(todo)) as progress:
        task = progress.task_ids[0]
        for _ in run(bench, state, todo, seconds=args.seconds):
            progress.advance(task)
    result = summary(state, todo, args.tokens)
    for name, c in result["methods"].items():
        rate = c["accepted"] / max(c["drafted"], 1)
        out.print(f"{name:20} {c['tokens']:7,} tokens  {c['differing']:4} differ  {rate:5.1%} of the drafted accepted")
    print(json.dumps(result))
    return 0 if passed(result) else 1


if __name__ == "__main__":
    raise SystemExit(main())
