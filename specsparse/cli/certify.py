"""Certify verifiers: enumerate every draft and every uniform, or sample, and compare the text with the target's.

VERIFIER is a function of yours as module:function (of a module in this folder or on PYTHONPATH), called
verify(p, q, drafts, uniforms), or verify(p, q, drafts, parents, uniforms) for trees; an ExternalVerifier, a Rule or a
draft-length policy as module:NAME; or a verifier of ours by its name. A function in numpy or torch needs no jax. See
docs/verifiers.md. Exit code 1: the promise is broken.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from specsparse.errors import UserError
from specsparse.speculative.base import DraftKind
from specsparse.support import registry

HOW = ("arrays", "dtype", "randomness", "uniforms", "batched", "tree", "drafts", "greedy", "samples", "shortest")
"""Options that are fields of `ExternalVerifier`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("verifiers", metavar="VERIFIER", nargs="+", help="mine:verify, or the name of one of ours")
    add("--vocab", type=int, help="tokens, 2 to 6 (default: 3 and a few cases of 2 to 6)")
    add("--gamma", type=int, help="longest draft, or deepest tree, 1 to 3")
    add("--seed", type=int, default=0, help="of the random distributions")
    add("--arrays", metavar="LIBRARY", help="what a function takes: numpy (default), torch or jax")
    add("--dtype", metavar="TYPE", help="of p, q and uniforms: float64 or float32")
    add("--randomness", metavar="FORM", help="uniforms, generator, key, seed or own (default: the parameter's name)")
    add("--uniforms", type=int, help="how many a call takes at most (default: 2K+1)")
    add("--batched", action="store_true", default=None, help="everything has a leading axis N")
    add("--tree", action="store_true", default=None, help="it judges trees (default: if it takes `parents`)")
    add("--drafts", choices=[kind.value for kind in DraftKind], help="how drafts are drawn")
    add("--greedy", action="store_true", default=None, help="p is that of temperature 0")
    add("--samples", type=int, help="sequences of each case, or twice the random points")
    add("--shortest", type=int, help="tokens of the shortest draft that it is given (default: 0)")
    add("--json", action="store_true", help="one JSON object instead of a table")


def main(args: argparse.Namespace) -> int:
    from specsparse.speculative.proof.certify import certifiable, certify
    from specsparse.speculative.proof.external import ExternalVerifier
    from specsparse.speculative.verifiers import get_verifier

    how = {name: value for name in HOW if (value := getattr(args, name)) is not None}
    if "drafts" in how:
        how["drafts"] = DraftKind(how["drafts"])
    chosen = []
    for name in args.verifiers:
        own = ":" in name or Path(f"{name}.py").is_file()
        found = registry.load(name, f"certify {name}") if own else get_verifier(name)
        one = get_verifier(name) if isinstance(found, type) else certifiable(found)
        if isinstance(one, ExternalVerifier):
            one = dataclasses.replace(one, **how)
        elif how:
            raise UserError(f"certify {name}: --{next(iter(how))} says how a function is called; this is no function")
        chosen.append(one)

    def show(line: str) -> None:
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    live = sys.stderr.isatty()
    try:
        report = certify(
            chosen, vocab=args.vocab, gamma=args.gamma, seed=args.seed, mutants=False, progress=show if live else None
        )
    finally:
        if live:
            show("")
    if args.json:
        print(json.dumps({"as_promised": report.passed, "failures": report.failures, "rows": report.rows()}))
    else:
        print(report.table(), end="")
        for row in report.rows():
            if not row["holds"]:
                print("\n  ".join([f"{row['name']}, {row['on']}:", *row["texts"]]))
    return 0 if report.passed else 1
