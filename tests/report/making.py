"""Runs on disk as the package itself writes them, with numbers that a test chooses."""

import dataclasses

from specsparse.experiments.trackers.tracking import Tracking
from specsparse.measure.conditions import UNKNOWN
from specsparse.report import record
from specsparse.report.record import PLAIN, SPECULATIVE, Pass, RunRecord
from specsparse.runtime.metrics import Counters, Times

TOKENS = 20


def one(prompt, task, side, seconds, *, repeat=0, accepted=None, ids=None):
    """A pass of 20 tokens. A speculative one drafts 2 tokens in each of 10 rounds; `accepted` says at which position
    how many stayed."""
    drafts = 0 if side == PLAIN else 10
    per_pos = tuple(accepted or (6, 4)) if drafts else ()
    times = Times(total=seconds)
    counters = Counters(
        num_rounds=drafts or TOKENS, num_drafts=drafts, num_draft_tokens=2 * drafts, num_tested=min(16, 2 * drafts),
        num_accepted_tokens=sum(per_pos), num_accepted_tokens_per_pos=per_pos, num_emitted_tokens=TOKENS, times=times,
    )  # fmt: skip
    ids = tuple(range(TOKENS)) if ids is None else ids
    return Pass(prompt, task, side, repeat, ids, f"text of {prompt}", "length", counters, 0.1, 5, seconds, 0.0)


def alphas(done, alpha):
    """The same passes, of which a verifier expected every tested token to stay with this chance."""
    out = []
    for p in done:
        n = p.counters.num_tested
        sums = {"alpha": n * alpha, "alpha_var": n * alpha * (1 - alpha), "num_alpha_tested": n}
        out.append(dataclasses.replace(p, counters=dataclasses.replace(p.counters, **sums)))
    return out


def passes(times, **more):
    """Both sides of prompts {(id, task): (plain seconds, speculative seconds)}."""
    out = []
    for (prompt, task), (plain_s, method_s) in times.items():
        out += [one(prompt, task, PLAIN, plain_s), one(prompt, task, SPECULATIVE, method_s, **more)]
    return out


def speed_run(directory, done, *, findings=None, split=None, verifier="greedy", kernels=None, taken=UNKNOWN, **config):
    """A run of kind `speed`; `split` gives every stage's seconds, `config` values by dotted key with __ for the dot."""
    done, logged = list(done), done
    if split:
        times = Times(**split, total=1.0)
        done = [
            Pass(**{**vars(p), "counters": Counters(**{**vars(p.counters), "times": times})})
            if p.side == SPECULATIVE
            else p
            for p in done
        ]
    tree = {"name": "made", "drafter": {"name": "prompt_lookup"}, "verifier": {"name": verifier}, "kind": "speed",
            "policy": {"name": "fixed", "gamma": 2}, "sampling": {"temperature": 0.0}}  # fmt: skip
    for key, value in config.items():
        group, name = key.split("__")
        tree[group][name] = value
    found = RunRecord(
        name="made",
        method={"drafter": "prompt_lookup", "verifier": verifier, "gamma": 2, "label": "lossless"},
        groups=record.groups(done, bytes_per_pass=1000, read_bandwidth=1e9),
        identity=record.identity_of(done, verifier=verifier),
        load_s=0.1, first_text_s=None, compile_s=0.1, read_bandwidth=1e9, bytes_per_pass=1000,
        findings=findings or {},
        conditions=taken,
    )  # fmt: skip
    ran = {"config": tree, "date": "2026-01-01", "command": ["specsparse.run"], "kernels": kernels or {}}
    whole = {"name": "made", **found.to_dict(), "definitions": record.DEFINITIONS, "manifest": ran, "config": tree}
    return write(directory, whole, logged)


def write(directory, record_, rows=()):
    """A record and its rows, through the tracker that writes them in a run."""
    tracker = Tracking(directory)
    for done in rows:
        tracker.log(done.row())
    tracker.finish(record_)
    return directory
