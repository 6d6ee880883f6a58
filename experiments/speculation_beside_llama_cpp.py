"""Claim: greedy speculation here writes at least 3.5 times the tokens a second of the best that llama.cpp's server has.

Both read the same file with the same threads and write as many tokens after the same prompt ids; no end token is
written, and prompts are not timed. llama-server runs plainly and with each of its methods that need no second model
(`--spec-type ngram-..`), at its own lengths and at short ones; ours runs plainly and with prompt_lookup, lookup_head
and mixed as `generate --drafter NAME` runs them. All sides take turns. Each text of llama-server has a process of its
own: its n-grams outlive a request, and would hold the text that the same prompt got before.

Expected: tokens a second by side and task, tokens a pass of the target, on how many prompts a side's text is its own
plain one; in the last line our best over the best of llama-server's methods, and over the best that it does at all.
Exit code 1 if the first is under 3.5, or one of our texts is not the plain one.
Run time: five minutes for SmolLM2-135M on two cores.
Command: python experiments/speculation_beside_llama_cpp.py --server /path/to/llama-server
"""

import argparse
import contextlib
import http.client
import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import specsparse
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.kernels import status
from specsparse.runtime.method import GREEDY, Method
from specsparse.support.files import Json
from specsparse.support.interleaved import interleaved
from specsparse.tools.bench import speculation
from specsparse.tools.peers.peer import TimedText

GOAL = 3.5
TASKS = ("chat", "code", "code-edit", "maths", "summarise", "retrieve")
DRAFTERS = ("prompt_lookup", "lookup_head", "mixed")
PLAIN, SERVER_PLAIN = "ours plain", "llama-server plain"
SHORT = {
    **{
        f"ngram-{name}": (f"--spec-ngram-{name}-size-n", "3", f"--spec-ngram-{name}-size-m", "4")
        for name in ("simple", "map-k", "map-k4v")
    },
    "ngram-mod": ("--spec-ngram-mod-n-match", "3", "--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "4"),
}
"""Options for n-grams of three tokens and drafts of four: its own lengths, 12 and more, are for long repetitions."""
ROOM = 128
"""Tokens of its context beside prompt and text, for drafts."""
PATIENCE_S = 60.0
Writer = Callable[[list[int]], TimedText]
Found = list[tuple[str, dict[str, list[TimedText]]]]
"""Of each prompt: its task, and the texts of all repeats by side."""


def ask(port: int, path: str, request: Json | None = None) -> tuple[int, Json]:
    """The status and the reply of a server on this machine; OSError, HTTPException: there is none."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET" if request is None else "POST", path, request and json.dumps(request))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[int]:
    """The port of a server that is ready and ends with the context; UserError with its last line if it ends itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=said, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + PATIENCE_S
            while True:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if ask(port, "/health")[0] == 200:
                        break
                if server.poll() is not None or time.monotonic() > end:
                    raise OSError("it is not ready")
                time.sleep(0.02)
            yield port
        except (OSError, http.client.HTTPException) as error:
            said.seek(0)
            last = [line for line in said.read().splitlines() if line.strip()][-1:] or [str(error)]
            raise UserError(f"--server {command[0]} failed: {last[0].strip()}: try {' '.join(command)}") from None
        finally:
            server.kill()
            server.wait()


def served(command: Sequence[str], tokens: int, ids: list[int]) -> TimedText:
    """Tokens after a prompt and a first one, by a server of their own."""
    request = {
        "prompt": ids, "n_predict": tokens + 1, "ignore_eos": True, "samplers": ["top_k"], "top_k": 1,
        "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip
    with serving(command) as port:
        code, reply = ask(port, "/completion", request)
    if code != 200 or len(reply["tokens"]) != tokens + 1:
        raise UserError(f"--server {command[0]} wrote no {tokens + 1} tokens (status {code}): {str(reply)[:200]}")
    timings = reply["timings"]
    return TimedText(timings["predicted_ms"] / 1e3, reply["tokens"], tokens - timings.get("draft_n_accepted", 0))


def said_by(binary: str, option: str) -> str:
    """What llama-server answers to --help or --version."""
    done = subprocess.run([binary, option], capture_output=True, text=True, errors="replace", check=False)
    return done.stdout + done.stderr


def servers_of(binary: str, base: Sequence[str], tokens: int) -> dict[str, Writer]:
    """llama-server's sides by name, with the methods that its help names; UserError if there are none."""
    types = re.search(r"--spec-type\s+(\S+)", said_by(binary, "--help"))
    methods = re.findall(r"ngram-[\w-]+", types[1]) if types else []
    if not methods:
        raise UserError(f"--server {binary}: its --help has no --spec-type with ngram methods: build a newer llama.cpp")
    sides: dict[str, tuple[str, ...]] = {SERVER_PLAIN: ()}
    for name in methods:
        sides[f"llama-server {name}"] = ("--spec-type", name)
        if name in SHORT:
            sides[f"llama-server {name}, short"] = ("--spec-type", name, *SHORT[name])
    return {name: partial(served, [binary, *base, *options], tokens) for name, options in sides.items()}


def ours_of(model: Model, drafters: Sequence[str], tokens: int) -> dict[str, Writer]:
    """Our sides by name; like llama-server they write no end token."""
    sampling = GREEDY.merged(max_tokens=tokens + 1, min_tokens=tokens + 1)
    methods = {PLAIN: Method()} | {f"ours {name}": speculation.method_of(model, name, None) for name in drafters}
    return {
        name: lambda ids, how=how: speculation.ours(model, how, ids, tokens, sampling) for name, how in methods.items()
    }


def measure(
    ours: Mapping[str, Writer], theirs: Mapping[str, Writer], jobs: Sequence[tuple[str, list[int]]], *, repeats: int
) -> Found:
    """Every prompt on every side in turn; ours once before, which compiles."""
    found: Found = []
    for task, ids in jobs:
        for write in ours.values():
            write(ids)
        sides = {name: partial(write, ids) for name, write in {**ours, **theirs}.items()}
        found.append((task, interleaved(sides, repeats=repeats, warm_up=0)))
    return found


def rates(found: Found, tokens: int) -> dict[str, dict[str, float]]:
    """Tokens a second by side and task ("all": of all prompts), by each prompt's median time."""
    table: dict[str, dict[str, float]] = {}
    for name in found[0][1]:
        medians = [(task, statistics.median(text.seconds for text in sides[name])) for task, sides in found]
        tasks = {task: [s for t, s in medians if t == task] for task, _ in medians} | {"all": [s for _, s in medians]}
        table[name] = {task: tokens * len(seconds) / sum(seconds) for task, seconds in tasks.items()}
    return table


def plain_texts(found: Found) -> dict[str, int]:
    """On how many prompts each side only wrote what it, or llama-server, writes plainly."""
    plain = {name: PLAIN if name.startswith("ours") else SERVER_PLAIN for name in found[0][1]}
    return {
        name: sum(all(text.tokens == sides[own][0].tokens for text in sides[name]) for _, sides in found)
        for name, own in plain.items()
    }


def ratios(table: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    """Our best speculation over the best of llama-server's methods, and over the best that it does, on all prompts."""
    ours = max(row["all"] for name, row in table.items() if name.startswith("ours") and name != PLAIN)
    theirs = {name: row["all"] for name, row in table.items() if not name.startswith("ours")}
    return ours / max(rate for name, rate in theirs.items() if name != SERVER_PLAIN), ours / max(theirs.values())


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="greedy speculation beside llama.cpp's server")
    parser.add_argument("--server", default="llama-server", help="the program (llama-server on the PATH)")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, help=f"ours ({' '.join(DRAFTERS)})")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="of the built-in prompts (spec_smollm2's six)")
    parser.add_argument("--limit", type=int, default=1, help="prompts of a task (1)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args(given)
    try:
        if min(args.limit, args.tokens, args.repeats) < 1:
            raise UserError("--limit, --tokens and --repeats are 1 at least")
        binary = shutil.which(args.server)
        if binary is None:
            raise UserError(f"--server {args.server}: no such program: build llama.cpp's target llama-server")
        model = specsparse.load(args.model)
        room = args.tokens + ROOM
        threads = str(status()["threads"])
        base = ["-m", str(model.path.resolve()), "-c", str(speculation.PROMPT + room), "-np", "1", "--no-warmup"]
        theirs = servers_of(binary, [*base, "-t", threads, "-tb", threads], args.tokens)
        jobs = speculation.jobs_of(model, room=room, tasks=args.tasks, limit_per_task=args.limit)
        found = measure(ours_of(model, args.drafters, args.tokens), theirs, jobs, repeats=args.repeats)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    table, plain = rates(found, args.tokens), plain_texts(found)
    a_pass = {
        name: args.tokens / statistics.fmean(text.passes for _, sides in found for text in sides[name])
        for name in table
    }
    print(f"{'tok/s':34}" + "".join(f"{task:>11}" for task in table[PLAIN]) + f"{'tokens/pass':>13}{'plain text':>12}")
    for name, row in table.items():
        cells = "".join(f"{rate:11.1f}" for rate in row.values())
        print(f"{name:34}{cells}{a_pass[name]:13.2f}{plain[name]:9}/{len(found)}")
    ratio, over_best = ratios(table)
    version = re.search(r"version: (.*)", said_by(binary, "--version"))
    print(json.dumps({
        "server": version and version[1], "ratio": ratio, "over_best": over_best, "goal": GOAL, "tok_s": table,
        "tokens_per_pass": a_pass, "plain_text": plain, "prompts": len(found),
    }))  # fmt: skip
    own = [count for name, count in plain.items() if name.startswith("ours")]
    return 0 if ratio >= GOAL and min(own) == len(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
