"""Claim: greedy decoding with prompt lookup writes at least three times the tokens a second of llama-cpp-python's own.

Both engines read the same file with the same threads and write as many tokens after the same prompt ids, end
tokens ignored, in turn: plainly, and with prompt lookup (llama-cpp-python's LlamaPromptLookupDecoding at the lengths
of --drafted, ours with the defaults of spec_smollm2). Prompts are not timed.

Expected: a table by task of tokens a second, ours over the better of the peer's lookups, and over the best that it does
at all, plain decoding included; exit code 1 where the first ratio over all prompts is under 3.
Run time: two minutes for SmolLM2-135M on two cores.
Command: SPECSPARSE_PEER_PYTHON=/path/to/python python experiments/lookup_beside_llama_cpp.py
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence

import specsparse
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.kernels import status
from specsparse.runtime.method import Method, MethodSpec, resolve
from specsparse.speculative.policies.base import Fixed
from specsparse.support.registry import Choice
from specsparse.tools.bench import speculation
from specsparse.tools.bench.speculation import ours
from specsparse.tools.peers.peer import Peer

GOAL = 3.0
PLAIN, LOOKUP = "ours plain", "ours lookup"
Seconds = dict[str, dict[str, list[float]]]
"""Of all repeats and prompts, by task and engine."""


def peers_name(drafted: int) -> str:
    return f"llama.cpp lookup {drafted}" if drafted else "llama.cpp plain"


def measure(
    model: Model, peer: Peer, jobs: Sequence[tuple[str, list[int]]], *, tokens: int, drafted: list[int],
    repeats: int,
) -> Seconds:  # fmt: skip
    """Every prompt on every engine in turn, the order turned round each time; the first time is not counted."""
    lookup = Choice("prompt_lookup", {"ngram_min": 2})
    methods = {PLAIN: Method(), LOOKUP: resolve(MethodSpec(lookup, policy=Fixed(4)), model)}
    sides = {name: (lambda ids, how=how: ours(model, how, ids, tokens).seconds) for name, how in methods.items()}
    sides |= {peers_name(k): (lambda ids, k=k: peer.speculate(ids, tokens, drafted=k).seconds) for k in (0, *drafted)}
    return speculation.measure(sides, jobs, repeats=repeats)


def rates(found: Seconds, tokens: int) -> dict[str, dict[str, float]]:
    """Tokens a second by task and engine, and of all tasks together."""
    each = {task: {name: statistics.median(s) for name, s in sides.items()} for task, sides in found.items()}
    whole = {name: statistics.fmean(sides[name] for sides in each.values()) for name in next(iter(each.values()))}
    return {task: {name: tokens / s for name, s in sides.items()} for task, sides in {**each, "all": whole}.items()}


def ratios(row: Mapping[str, float]) -> tuple[float, float]:
    """Our prompt lookup over the best of the peer's lookups, and over the best that the peer does."""
    peer = {name: rate for name, rate in row.items() if name not in (PLAIN, LOOKUP)}
    lookups = [rate for name, rate in peer.items() if name != peers_name(0)]
    return row[LOOKUP] / max(lookups), row[LOOKUP] / max(peer.values())


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="prompt lookup beside llama-cpp-python's")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", nargs="+", help="of the built-in prompts (all)")
    parser.add_argument("--limit", type=int, default=1, help="prompts of a task (1)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafted", type=int, nargs="+", default=[2, 10], help="tokens of the peer's drafts (2 10)")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(given)
    try:
        model = specsparse.load(args.model)
        with Peer("llama.cpp") as peer:
            room = args.tokens + max(args.drafted) + 2
            threads = status()["threads"]
            peer.open(model.path, model.config, threads=threads, room=speculation.PROMPT + room, depth=0)
            jobs = speculation.jobs_of(model, room=room, tasks=args.tasks, limit_per_task=args.limit)
            found = measure(model, peer, jobs, tokens=args.tokens, drafted=args.drafted, repeats=args.repeats)
            version = peer.version
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    table = rates(found, args.tokens)
    names = "".join(f"{name:>20}" for name in table["all"])
    print(f"{'tok/s':12}{names}{'ours / lookup':>15}{'ours / best':>13}")
    for task, row in table.items():
        over = "{:15.2f}{:13.2f}".format(*ratios(row))
        print(f"{task:12}" + "".join(f"{rate:20.1f}" for rate in row.values()) + over)
    lookup, best = ratios(table["all"])
    print(json.dumps({"peer": version, "ratio": lookup, "over_best": best, "goal": GOAL, "tok_s": table}))
    return 0 if lookup >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
