"""Claim: no damaged GGUF file crashes, hangs or swells its reader: loader, tokenizer, weights and four tokens.

Expected: N mutants of small models end in `error` (one clear line) or `result`; no `bug`, `crash`, `hang` or `memory`.
Run time: about three minutes for 10,000.
Command: python experiments/fuzz_gguf.py --n 10000

Each worker is its own process, under a memory limit, and says which mutant it is at, so that a segmentation fault or a
hang costs one mutant and is counted, with its seed.
"""

import argparse
import collections
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from specsparse.engine.gguf.reader import open_gguf
from specsparse.errors import UserError
from specsparse.testing import Runner, load_everything, mutate, write_tiny_gguf

KINDS = {
    "bpe": {"quant": "Q4_0", "d_model": 32, "d_ff": 32, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 262},
    "spm": {"tokenizer": "spm", "quant": "F16", "d_model": 16, "d_ff": 16, "n_heads": 2, "vocab_size": 262},
    "bare": {"tokenizer": "none", "vocab_size": 11, "rope_scaling": "yarn", "rope_factor": 2.0, "freq_factors": True},
}
HANG_S = 60  # a mutant of a new shape compiles its own program
MEMORY = 16 << 30  # of addresses, most of them XLA's reserve


def outcome(path: Path, run: Runner) -> tuple[str, str]:
    """What loading and running the file ends in, and the reason."""
    try:
        load_everything(path, then=run)
    except UserError as error:
        return ("bug", f"two lines: {error}") if "\n" in str(error) else ("error", str(error).partition(": ")[2])
    except MemoryError:
        return "memory", "MemoryError"
    except Exception as error:
        return "bug", f"{type(error).__name__}: {error}"
    return "result", ""


def work(blob: bytes, header: int, seeds: range, path: Path, pipe: Connection) -> None:
    """Sends (seed, outcome, reason) for each mutant, in order."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    run = Runner()
    for seed in seeds:
        path.write_bytes(mutate(blob, seed, header=header))
        pipe.send((seed, *outcome(path, run)))
    pipe.close()


def run(blob: bytes, header: int, seeds: range, path: Path):
    """Yields (seed, outcome, reason), starting another worker after one that died or hung."""
    context = multiprocessing.get_context("spawn")  # XLA's threads do not survive a fork
    while seeds:
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(blob, header, seeds, path, sender))
        worker.start()
        sender.close()
        ended = ("crash", "")
        try:
            while seeds:
                if not receiver.poll(HANG_S):
                    ended = ("hang", f"over {HANG_S} s")
                    break
                yield receiver.recv()
                seeds = seeds[1:]
        except EOFError:
            worker.join()
            ended = ("crash", f"exit code {worker.exitcode}")
        if seeds:
            yield (seeds[0], *ended)
            seeds = seeds[1:]
        worker.kill()
        worker.join()


def main() -> int:
    parser = argparse.ArgumentParser(description="damage small GGUF files and count how loading them ends")
    parser.add_argument("--n", type=int, default=10_000, help="mutants, over all kinds of file")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind, keywords in KINDS.items():
            valid = write_tiny_gguf(Path(folder) / f"{kind}.gguf", n_layers=1, **keywords)
            blob = valid.read_bytes()
            header = len(blob) - sum(tensor.nbytes for tensor in open_gguf(valid).tensors.values())
            seeds = range(args.first, args.first + -(-args.n // len(KINDS)))
            for seed, what, reason in run(blob, header, seeds, Path(folder) / "mutant.gguf"):
                counts[what] += 1
                if what not in ("error", "result"):
                    print(f"{what}: kind {kind}, seed {seed}: {reason}", file=sys.stderr)
    bad = sum(n for what, n in counts.items() if what not in ("error", "result"))
    print(json.dumps({"mutants": sum(counts.values()), **counts, "seconds": round(time.perf_counter() - start, 1)}))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
