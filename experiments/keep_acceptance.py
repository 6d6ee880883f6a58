"""Claim: acceptance depends on target, draft and text, not on the machine; what a run counted can be kept.

Reads record.json files of `+experiment=compare` or `spec` and writes the table that `python -m specsparse advise` takes
its rates from, sorted, with the run's commit and date as each row's source.

Expected: specsparse/data/acceptance.yaml, one row a target and drafter, one line a kind of text.
Run time: a second.
Command: python experiments/keep_acceptance.py runs/compare/*/record.json
"""

import argparse
import json
from pathlib import Path

from specsparse.measure.advice import accepted
from specsparse.measure.advice.accepted import KEPT, Accepted


def main() -> int:
    parser = argparse.ArgumentParser(description="keep the acceptance that runs counted")
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=KEPT)
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
        for drafter, found in accepted.of_record(path).items():
            named = record["config"]["drafter"].get("model") if drafter == "model" else None
            rows[str(model), str(named or drafter)] = (source, found.tasks)
    head = [line for line in args.out.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    body = [line for (target, drafter), row in sorted(rows.items()) for line in lines(target, drafter, *row)]
    args.out.write_text("\n".join([*head, *(body or ["[]"])]) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(rows)} rows")
    return 0


def lines(target: str, drafter: str, source: str, tasks: dict[str, Accepted]) -> list[str]:
    """A row of the table."""
    out = [f"- target: {target}", f"  drafter: {drafter}", f'  source: "{source}"', "  tasks:"]
    for task, a in sorted(tasks.items()):
        reach = ", ".join(f"{r:.3f}" for r in a.reach)
        length = "" if a.length is None else f", length: {a.length:.2f}"
        numbers = f"alpha: {a.alpha:.3f}, reach: [{reach}], share: {a.share:.3f}{length}, weight: {a.weight:g}"
        out.append(f"    {task}: {{{numbers}}}")
    return out


if __name__ == "__main__":
    raise SystemExit(main())
