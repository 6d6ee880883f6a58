"""Claim: with `greedy` and `match` speculative decoding writes the tokens of plain decoding, on a real model too.

Expected: 0 differing tokens of 100,000, drafts accepted and refused by every method; exit code 1 otherwise.
Temperatures 0, 0.6 and 1.0, top-k, top-p, min-p and penalties, chains of 1 to 8 tokens and trees, every drafter that
needs no second file. A batch is eight prompts, each with sampling parameters, a noise and a draft length of its own, so
that few programs serve all of it; plain decoding of the same batch is done once and kept.
Run time: about twenty minutes for SmolLM2-135M on two cores. What is done is kept in --state: a second call goes on.
Command: python experiments/identity.py --tokens 100000
"""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import specsparse
from specsparse.data import prompts
from specsparse.engine.config import ModelConfig
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.method import Method, MethodSpec, resolve
from specsparse.runtime.session import Request, Session
from specsparse.speculative.base import AnyDrafter, Drafter
from specsparse.speculative.drafters import get_drafter
from specsparse.speculative.drafters.spec import DrafterSpec
from specsparse.speculative.policies.base import Policy
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.support.terminal import console, counting

ROWS = 8
"""Sequences of a batch."""
PROMPT, TEXT = 120, 112
"""Tokens of a prompt, at most, and of a text: with a draft of 15 they fit a cache of 256."""
GAMMA = 8
"""Tokens of the longest chain."""

T0, T6, T10 = (SamplingParams(temperature=t, max_tokens=TEXT, ignore_eos=True) for t in (0.0, 0.6, 1.0))
SAMPLINGS: dict[str, list[SamplingParams]] = {
    "greedy": [T0] * ROWS,
    "truncated": [
        T0, T6, T10, T6.merged(top_k=40), T6.merged(top_p=0.9), T10.merged(min_p=0.05),
        T10.merged(top_k=100, top_p=0.95, min_p=0.01), T10.merged(top_p=0.8),
    ],
    "penalised": [
        T0.merged(repetition_penalty=1.2), T0.merged(frequency_penalty=0.4), T6.merged(presence_penalty=0.5),
        T6.merged(repetition_penalty=1.1, top_k=40, top_p=0.95), T6.merged(frequency_penalty=0.3, min_p=0.02),
        T10.merged(presence_penalty=0.4, frequency_penalty=0.2, top_p=0.9),
        T10.merged(repetition_penalty=0.9, top_k=50),
        T10.merged(repetition_penalty=1.1, presence_penalty=-0.3, top_k=100, top_p=0.95, min_p=0.01),
    ],
}  # fmt: skip
"""Sampling parameters of the rows of a batch; distributions of one name share their programs."""


@dataclasses.dataclass(frozen=True)
class RowLengths(Policy):
    """Row b drafts b + 1 nodes, up to gamma: all lengths in one program."""

    def init(self, batch: int) -> Any:
        """int32[batch]: nodes of each row."""
        return jnp.minimum(jnp.arange(batch, dtype=jnp.int32) + 1, self.gamma)


@dataclasses.dataclass(frozen=True)
class Spread(Policy):
    """Nodes of a tree over the rows, the last of which has them all."""

    def init(self, batch: int) -> Any:
        """int32[batch]: nodes of each row."""
        return -(-self.gamma * (jnp.arange(batch, dtype=jnp.int32) + 1) // batch)


def _lookup(name: str, **options: Any) -> Callable[[ModelConfig], Drafter]:
    return lambda config: get_drafter(name, gamma=GAMMA, **options)


def few_layers(config: ModelConfig) -> tuple[int, ...]:
    """The first fifth, the last tenth and some between: a draft that is often wrong."""
    n = config.n_layers
    return tuple(i for i in range(n) if i < n / 5 or i >= n - n // 10 or i % 6 == 0)


def _layers(**options: Any) -> Callable[[ModelConfig], DrafterSpec]:
    return lambda config: get_drafter("layer_skip", policy=RowLengths(GAMMA), layers=few_layers(config), **options)


def _tree(name: str, *, temperature: float = 0.0, **options: Any) -> Callable[[ModelConfig], DrafterSpec]:
    tree = get_tree(name, **options)
    return lambda config: get_drafter(
        "layer_skip", policy=Spread(tree.max_nodes), tree=tree, layers=few_layers(config), temperature=temperature
    )


def _scripted_chain(config: ModelConfig) -> Drafter:
    return get_drafter("scripted", gamma=GAMMA, accept=(8, 0, 3, 1, 7, 5, 2, 6, 4), vocab_size=config.vocab_size)


def _scripted_tree(config: ModelConfig) -> Drafter:
    template = TreeTemplate.kary((2, 2, 1))
    return get_drafter("scripted", template=template, ends=(6, -1, 9, 1, 3, 7, 0, 5), vocab_size=config.vocab_size)


METHODS: dict[str, Callable[[ModelConfig], AnyDrafter]] = {
    "prompt_lookup": _lookup("prompt_lookup"),
    "ngram_simple": _lookup("ngram_simple", size_n=2, size_m=8),
    "ngram_map": _lookup("ngram_map", size_n=2, size_m=4),
    "suffix": _lookup("suffix"),
    "recycle": _lookup("recycle"),
    "scripted": _scripted_chain,
    "scripted tree": _scripted_tree,
    "layer_skip": lambda config: get_drafter("layer_skip", policy=RowLengths(GAMMA)),
    "layer_skip drawn": _layers(temperature=0.7),
    "layer_skip trimmed": _layers(draft_vocab=8000),
    "sparse_self": lambda config: get_drafter("sparse_self", policy=RowLengths(GAMMA)),
    "sparse_kv": lambda config: get_drafter("sparse_kv", policy=RowLengths(GAMMA), slots=32, window=16),
    "head": lambda config: get_drafter("head", policy=RowLengths(GAMMA)),
    "head drawn": lambda config: get_drafter("head", policy=RowLengths(GAMMA), temperature=0.7),
    "lookup_head": lambda config: get_drafter("lookup_head", policy=RowLengths(GAMMA)),
    "mixed": lambda config: get_drafter("mixed", policy=RowLengths(GAMMA)),
    "static tree": _tree("static", widths=(3, 2, 1)),
    "p_split tree": _tree("p_split", nodes=8, n_parallel=4, p_split=0.1),
    "dynamic tree": _tree("dynamic", total=10, depth=4, top_k=3),
    "sequoia tree": _tree("sequoia", nodes=10),
    "iid tree": _tree("sampled_iid", widths=(3, 2), temperature=0.7),
    "wor tree": _tree("sampled_wor", widths=(3, 1, 1), temperature=0.7),
}
"""Drafters by name, made for a model."""


class IdentityUnit(NamedTuple):
    """One batch under one method."""

    method: str
    sampling: str
    batch: int


def units(tokens: int, methods: list[str]) -> list[IdentityUnit]:
    """Batches of that many tokens in all, spread over methods and sampling; those of one program follow each other."""
    names, count = list(SAMPLINGS), -(-tokens // (ROWS * TEXT))
    found: list[IdentityUnit] = []
    for turn in range(count):
        sweep, m = divmod(turn, len(methods))
        found.append(IdentityUnit(methods[m], names[(m + sweep) % len(names)], sweep // len(names)))
    return sorted(found, key=lambda u: (methods.index(u.method), names.index(u.sampling), u.batch))


@dataclasses.dataclass(frozen=True)
class IdentityBench:
    """A model and the ids of the built-in prompts, cut to their last PROMPT tokens."""

    model: Model
    ids: list[np.ndarray]

    @classmethod
    def of(cls, model: Model) -> "IdentityBench":
        """All built-in prompts, in an order that seed 0 gives."""
        texts = [p.text for p in prompts.load(limit_per_task=4)]
        every = [model.check_ids(model.tokenizer.encode(text, add_special=True)[-PROMPT:]) for text in texts]
        order = np.random.default_rng(0).permutation(len(every))
        return cls(model, [every[i] for i in order])

    def sequences(self, sampling: str, batch: int) -> list[Request]:
        """Row b has prompt 8 batch + b, and the parameters shifted by the batch, so that all meet all draft lengths."""
        rows = range(ROWS)
        sampling = SAMPLINGS[sampling]
        ids = [self.ids[(ROWS * batch + b) % len(self.ids)] for b in rows]
        return [Request(ids[b], sampling[(b + batch) % len(sampling)], seed=1000 + batch, sample=b) for b in rows]

    def decode(self, sequences: list[Request], method: Method) -> Session:
        """The session at its end."""
        session = Session(self.model, sequences, method)
        session.advance()
        return session

    def plain(self, sampling: str, batch: int) -> np.ndarray:
        """int32[ROWS, TEXT]."""
        return np.stack(self.decode(self.sequences(sampling, batch), Method()).tokens())

    def compare(self, unit: IdentityUnit, wanted: np.ndarray) -> dict[str, int]:
        """Tokens, how many of them differ, and the drafts' counters."""
        sequences = self.sequences(unit.sampling, unit.batch)
        session = self.decode(sequences, self.method(unit, sequences, wanted))
        differing = sum(differing_tokens(got, row) for got, row in zip(session.tokens(), wanted, strict=True))
        counters = session.counters()
        return {
            "tokens": wanted.size,
            "differing": differing,
            "rounds": sum(c.num_rounds for c in counters),
            "drafted": sum(c.num_draft_tokens for c in counters),
            "accepted": sum(c.num_accepted_tokens for c in counters),
        }

    def method(self, unit: IdentityUnit, sequences: list[Request], wanted: np.ndarray) -> Method:
        """The drafter with its verifier; `scripted` is told `wanted`, int32[ROWS, TEXT], the plain texts."""
        drafter = METHODS[unit.method](self.model.config)
        verifier = ("tree_" if drafter.tree else "") + ("greedy" if self.greedy(unit, drafter) else "match")
        policy = None if drafter.built is None or drafter.tree else RowLengths(GAMMA)
        method = resolve(MethodSpec(drafter, verifier, policy, sampling=SAMPLINGS[unit.sampling][0]), self.model)
        if not unit.method.startswith("scripted"):
            return method
        truth = np.full((ROWS, PROMPT + TEXT), -1, np.int32)  # prompt and plain continuation, for `scripted` to know
        for row, s, text in zip(truth, sequences, wanted, strict=True):
            row[: len(s.prompt) + TEXT] = [*s.prompt, *text]
        return dataclasses.replace(method, weights=lambda capacity: jnp.asarray(truth))

    @staticmethod
    def greedy(unit: IdentityUnit, drafter: AnyDrafter) -> bool:
        """Drawn drafts are for `match` only."""
        return unit.sampling == "greedy" and drafter.kind.value == "one_hot"


def differing_tokens(got: np.ndarray, wanted: np.ndarray) -> int:
    """Positions that differ, and those that one text has and the other has not."""
    same = min(len(got), len(wanted))
    return int((got[:same] != wanted[:same]).sum()) + abs(len(got) - len(wanted))


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

    def add_plain(self, sampling: str, batch: int, tokens: np.ndarray) -> None:
        self.plain[sampling, batch] = tokens
        self._write({"plain": [sampling, batch], "tokens": tokens.tolist()})

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
            if (unit.sampling, unit.batch) not in state.plain:
                state.add_plain(unit.sampling, unit.batch, bench.plain(unit.sampling, unit.batch))
            state.add(unit, bench.compare(unit, state.plain[unit.sampling, unit.batch]))
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
    with counting(out, "batches", len(todo)) as step:
        for _ in run(bench, state, todo, seconds=args.seconds):
            step()
    result = summary(state, todo, args.tokens)
    for name, c in result["methods"].items():
        rate = c["accepted"] / max(c["drafted"], 1)
        out.print(f"{name:20} {c['tokens']:7,} tokens  {c['differing']:4} differ  {rate:5.1%} of the drafted accepted")
    print(json.dumps(result))
    return 0 if passed(result) else 1


if __name__ == "__main__":
    raise SystemExit(main())
