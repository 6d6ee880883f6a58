"""Claim: acceptance depends on target, draft and text, not on the machine; what a run counted can be kept.

Reads record.json files of `+experiment=compare` or `spec` and writes the table that `python -m specsparse advise` takes
its rates from, sorted, with the run's commit and date as each row's source.

With --siblings the drafters of these records that draft trees decode the same prompts with `FAN`, by which
acceptance by rank is counted as for Sequoia's trees.

Expected: specsparse/data/acceptance.yaml, one row a target and drafter, one line a kind of text.
Run time: a second; with --siblings a minute a drafter.
Command: python experiments/keep_acceptance.py runs/compare/*/record.json --siblings
"""

import argparse
import dataclasses
import json
from pathlib import Path

import specsparse
from specsparse.data import prompts
from specsparse.engine.sampling.params import SamplingParams
from specsparse.experiments import decoding
from specsparse.measure.costs import acceptance
from specsparse.measure.costs.acceptance import KEPT, Accepted
from specsparse.runtime.method import MethodSpec, drafts_trees, resolve
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.trees.static import StaticTree
from specsparse.support.registry import Choice


def main() -> int:
    parser = argparse.ArgumentParser(description="keep the acceptance that runs counted")
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--siblings", action="store_true", help="count acceptance by rank too")
    args = parser.parse_args()
    rows = {}
    for path in args.records:
        record = json.loads(path.read_text(encoding="utf-8"))
        manifest, model = record["manifest"], record["config"]["model"]["path"]
        commit = ((manifest.get("git") or {}).get("commit") or "no checkout")[:7]
        heat, gamma = record["config"]["sampling"]["temperature"], record["config"]["policy"]["gamma"]
        prompts = record["config"]["data"]["source"]
        source = (
            f"{record['name']} at {commit}, {manifest['date'][:10]}: {prompts} prompts, T = {heat:g}, gamma {gamma}"
        )
        for drafter, found in acceptance.from_record(path).items():
            named = record["config"]["drafter"].get("model") if drafter == "model" else None
            tasks = found.tasks
            if args.siblings and drafts_trees(drafter):
                tasks = with_siblings(record["config"], drafter, {} if named is None else {"model": named}, tasks)
            rows[str(model), str(named or drafter)] = (source, tasks)
    head = [line for line in args.out.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    body = [line for (target, drafter), row in sorted(rows.items()) for line in lines(target, drafter, *row)]
    args.out.write_text("\n".join([*head, *(body or ["[]"])]) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(rows)} rows")
    return 0


def with_siblings(
    config: dict, drafter: str, options: dict[str, str], tasks: dict[str, Accepted]
) -> dict[str, Accepted]:
    """The rates with the chance of each of eight children of a node, on the same prompts."""
    model, params = specsparse.load(config["model"]["path"]), SamplingParams(temperature=0.0)
    found: dict[str, Accepted] = {}
    tree = StaticTree(acceptance.FAN)
    method = resolve(MethodSpec(Choice(drafter, options), policy=Fixed(acceptance.FAN.size), tree=tree), model)
    for task, rates in tasks.items():
        chosen = prompts.load(tasks=[task], limit_per_task=config["data"]["limit_per_task"])
        ids = [decoding.ids_of(model, p, chat=config["data"]["chat"]) for p in chosen]
        by_rank = acceptance.by_rank(model, method, ids, params)
        found[task] = dataclasses.replace(rates, ranks=tuple(by_rank))
        print(f"{drafter}, {task}: {', '.join(f'{r:.3f}' for r in by_rank)}", flush=True)
    return found


def lines(target: str, drafter: str, source: str, tasks: dict[str, Accepted]) -> list[str]:
    """A row of the table."""
    out = [f"- target: {target}", f"  drafter: {drafter}", f'  source: "{source}"', "  tasks:"]
    for task, a in sorted(tasks.items()):
        reach = ", ".join(f"{r:.3f}" for r in a.reach)
        length = "" if a.length is None else f", length: {a.length:.2f}"
        numbers = f"alpha: {a.alpha:.3f}, reach: [{reach}], share: {a.share:.3f}{length}, weight: {a.weight:g}"
        if a.ranks:
            numbers += f", ranks: [{', '.join(f'{r:.3f}' for r in a.ranks)}]"
        out.append(f"    {task}: {{{numbers}}}")
    return out


if __name__ == "__main__":
    raise SystemExit(main())
