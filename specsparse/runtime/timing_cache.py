"""The timing cache: how long forwards, rounds and drafts of one model file take on this machine, kept in a file.

`CostTable` holds the measured times and predicts from them. `load` and `save` keep one table for each model file and
machine in the user's cache. `policy_times` reads it, and guesses if nothing was measured. `measure.costs` measures.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specsparse import kernels
from specsparse.engine import hosts
from specsparse.engine.cache import WHOLE, LayerWindows
from specsparse.engine.config import ModelConfig
from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.kernels.processor import cpu_info
from specsparse.models import catalogue
from specsparse.speculative import expected
from specsparse.speculative.drafters import DRAFTERS, takes
from specsparse.support.files import atomically, cache_dir
from specsparse.support.options import as_yaml, values_of
from specsparse.support.registry import Registry, source_of

VERSION = 6
"""Version of what is measured and how. A table of another version is measured again."""


@dataclass(frozen=True)
class DraftCost:
    """Seconds to draft: `fixed_s` for each round that drafts, and `token_s` for each drafted token."""

    token_s: float = 0.0
    fixed_s: float = 0.0


FREE = DraftCost()
"""A draft that costs nothing."""


@dataclass(frozen=True)
class CostTable:
    """Measured times of one model file on one machine, in seconds."""

    ns: tuple[int, ...]  # rows of the measured rounds, ascending from 1
    kv_base: int  # tokens in the cache during them
    forward_s: tuple[float, ...]  # seconds of a step of the loop with so many rows, without what any round adds
    kv_s: float  # seconds that one more token in the cache adds to a forward if all layers read it
    kv_row_s: float  # the same for each row
    plain_s: float  # a plain decoding step in the loop, at `kv_base`
    # round_s, round_token_s: what a speculative round adds to a plain step, without a draft too (verdict, commit,
    # counters), and what each token that a draft has room for adds
    round_s: float
    round_token_s: float
    host_s: float  # one call of the loop, once a generation
    # bandwidth, int8, f32: bytes read and multiply-adds per second at best; int8 may be None
    bandwidth: float
    int8: float | None
    f32: float
    # cost of drafters by `cost_key`; `token_s` is the cost of a level if they draft trees
    drafts: dict[str, DraftCost] = field(default_factory=dict)
    # measured acceptance by name. One rate for chains, one rate for each rank of siblings, tokens emitted and nodes
    # drafted a round for a tree
    acceptance: dict[str, tuple[float, ...]] = field(default_factory=dict)
    windows: LayerWindows = WHOLE  # the layers' windows. A token that only some layers read adds their share
    residuals: dict[str, Any] = field(default_factory=dict)  # errors of the fits, see `measure.costs.measuring.measure`
    identity: dict[str, object] = field(default_factory=dict)  # the file and the machine that the table is valid for

    def __post_init__(self):
        times = (*self.forward_s, self.plain_s, self.bandwidth, self.f32)
        ascending = list(self.ns) == sorted(set(self.ns)) and self.ns[:1] == (1,)
        if not ascending or len(self.ns) != len(self.forward_s) or any(not t > 0 for t in times):
            raise ValueError("a cost table needs rows ascending from 1 and a time above 0 for each")

    def forward(self, n: float, kv_length: float | None = None, batch: int = 1) -> float:
        """Seconds of a forward of n rows in each of `batch` sequences: linear between measured n, and by the last slope
        beyond them. Rows of a batch are taken to cost what those of one sequence do; every sequence reads its cache."""
        if len(self.ns) == 1:
            at_base = self.forward_s[0] * batch * n
        else:
            right = min(max(bisect.bisect_left(self.ns, batch * n), 1), len(self.ns) - 1)
            (n0, n1), (t0, t1) = self.ns[right - 1 : right + 1], self.forward_s[right - 1 : right + 1]
            at_base = t0 + (batch * n - n0) * (t1 - t0) / (n1 - n0)
        base, kv = self.kv_base, self.kv_base if kv_length is None else kv_length
        more = self.windows.read(1, kv) - self.windows.read(1, base)
        others = (batch - 1) * self.kv_s * self.windows.read(1, base)
        return at_base + more * (batch * self.kv_s + self.kv_row_s * batch * n) + others

    def step(self, kv_length: float | None = None, batch: int = 1) -> float:
        return self.plain_s + self.forward(1, kv_length, batch) - self.forward(1)

    def v(self, n: float, kv_length: float | None = None, batch: int = 1) -> float:
        """v(n): a step of n rows a sequence in plain steps; v(1) = 1."""
        more = self.forward(n, kv_length, batch) - self.forward(1, kv_length, batch)
        return 1.0 + more / self.step(kv_length, batch)

    def overhead(self, gamma: int, kv_length: float | None = None, batch: int = 1) -> float:
        """c0: verdict, commit and counters of a round of gamma tokens, in plain steps."""
        return (self.round_s + self.round_token_s * gamma) / self.step(kv_length, batch)

    def round(self, rows: float, room: int) -> float:
        """Seconds of a round that verifies `rows` rows with room for `room` drafted ones, without the drafting."""
        return self.v(rows) * self.step() + self.round_s + self.round_token_s * room

    def draft_costs(self, draft: DraftCost, gamma: int, kv_length: float | None = None) -> dict[str, float]:
        """c and c0 in plain steps, as `speculative.expected` takes them, of rounds with room for gamma tokens."""
        step = self.step(kv_length)
        return {"c": draft.token_s / step, "c0": self.overhead(gamma, kv_length) + draft.fixed_s / step}

    def predict(
        self, alpha: float, gamma: int, *, draft: DraftCost = FREE, kv_length: float | None = None, share: float = 1.0
    ) -> float:
        """Predicted speed-up of chains of gamma tokens at acceptance alpha, which a `share` of the rounds drafts."""
        costs = self.draft_costs(draft, gamma, kv_length)
        return expected.predicted_speedup(alpha, gamma, lambda n: self.v(n, kv_length), share=share, **costs)

    def predict_tree(self, tokens: float, nodes: float, *, room: int, draft: DraftCost = FREE) -> float:
        """Predicted speed-up of trees of `nodes` of at most `room` nodes that give `tokens` tokens a round.

        The cost of drafting a whole tree is all in `draft.fixed_s`.
        """
        return tokens / expected.round_cost(self.v, nodes, **self.draft_costs(draft, room))

    def best_gamma(
        self, alpha: float, *, draft: DraftCost = FREE, kv_length: float | None = None, share: float = 1.0
    ) -> tuple[int, float]:
        """The draft length up to 16 of the highest predicted speed-up, and that speed-up; (0, 1) if none pays."""
        costs = {"draft": draft, "kv_length": kv_length, "share": share}
        return max(((g, self.predict(alpha, g, **costs)) for g in range(17)), key=lambda pair: pair[1])

    def policy_options(
        self, gamma: int, drafter: str | None = None, *, kv_share: float = 0.0, batch: int = 1
    ) -> dict[str, Any]:
        """The options `v`, `c`, `c0`, `kv`, `kv_row`, `kv_draft` of `cost` and `auto_off`, for drafts of up to gamma
        tokens; `kv_share` as `policy_times`.

        They are in rounds without a draft, of the same loop: a round costs what it does, whether or not it drafts. Of
        `batch` sequences v(n) is the time of batch n rows over that of batch; drafting is taken to grow as that does.
        """
        draft, endless = self.drafts.get(drafter or "", FREE), self.windows.endless

        def bare(rows: int) -> float:
            """A round behind no text: what the text adds is for the policy to say."""
            text = endless * self.kv_base * (self.kv_s + rows * self.kv_row_s)
            return max(self.round(rows, gamma) - text, self.round(rows, gamma) / 10)

        alone, each = bare(batch), bare(1)
        v = [max(bare(batch * n) / alone, 1e-3) for n in range(1, gamma + 2)]
        thousand = 1000 * batch * endless / alone
        kv = {"kv": thousand * self.kv_s, "kv_row": thousand * self.kv_row_s}
        kv["kv_draft"] = kv_share * (kv["kv"] + kv["kv_row"])
        return {"v": v, "c": draft.token_s / each, "c0": draft.fixed_s / each, **kv}

    def tree_options(self, nodes: int, drafter: str) -> dict[str, Any]:
        """The options `cost`, `level_cost` of the tree `sequoia`, for trees of up to `nodes` nodes, in plain steps."""
        costs = [self.draft_costs(self.drafts.get(drafter, FREE), n) for n in range(nodes + 1)]
        return {"cost": [max(self.v(n + 1) + costs[n]["c0"], 1e-3) for n in range(nodes + 1)],
                "level_cost": costs[0]["c"]}  # fmt: skip

    def with_draft(self, name: str, cost: DraftCost) -> "CostTable":
        return dataclasses.replace(self, drafts={**self.drafts, name: cost})

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CostTable":
        """The inverse of `to_dict`; TypeError, ValueError or KeyError if the values are not a table."""
        given = dict(values)
        given["ns"] = tuple(int(n) for n in given["ns"])
        given["forward_s"] = tuple(float(t) for t in given["forward_s"])
        given["drafts"] = {name: DraftCost(**cost) for name, cost in given.get("drafts", {}).items()}
        given["acceptance"] = {key: tuple(map(float, rates)) for key, rates in given.get("acceptance", {}).items()}
        shares = given.get("windows", {}).get("shares", WHOLE.shares)
        given["windows"] = LayerWindows(tuple((int(window), float(share)) for window, share in shares))
        return cls(**given)


def cost_key(name: str, options: Mapping[str, object] | None = None, *, among: Registry[Any] = DRAFTERS) -> str:
    """The name under which the cost of a drafter is kept: its own, and the options that are not its defaults.

    A file among them has its fingerprint in the name, so that another file in its place is another drafter. `among` is
    the registry of the name. UserError for a draft model or a head that is not there.
    """
    defaults = values_of(among.make(name, {})) if among.is_builtin(name) else {}
    given = {k: v for k, v in sorted((options or {}).items()) if v is not None and as_yaml(v) != defaults.get(k)}
    words = []
    for key, value in given.items():
        file = _file_of_option(key, value)
        words.append(f"{key}={value}" + (f" #{_fingerprint([file])}" if file else ""))
    if ":" in name:
        words.append(f"#{_fingerprint(source_of(name))}")
    elif "head" in takes(name) - given.keys() or (name == "sparse_kv" and "draft_vocab" not in given):
        # a target finds its own among those of the package
        from specsparse.speculative.drafters.heads.head import SHIPPED

        words.append(f"head=shipped #{_fingerprint(SHIPPED.glob('*.gguf'))}")
    return f"{name} ({', '.join(words)})" if words else name


def _fingerprint(paths: Iterable[Path]) -> str:
    """Eight hex digits of names, sizes in bytes and modification times in ns."""
    known = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sorted(paths)]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]


def _file_of_option(option: str, value: object) -> Path | None:
    """The file that a drafter's option names, or None."""
    if not isinstance(value, str | Path):
        return None
    if option == "model":
        return catalogue.resolve(value)
    if option == "head":
        from specsparse.speculative.drafters.heads.head import find

        return find(value, None)
    path = os.path.expanduser(value)
    there = os.path.exists if option == "path" else os.path.isfile
    return Path(path) if there(path) else None


def identity(model: Model) -> dict[str, object]:
    """Facts that a table is valid for: the file (name, size, time), the machine, kernels, threads, cache, FFN, mesh."""
    sparse = {} if model.ffn == "dense" else {"ffn": model.ffn, "rule": model.rule}
    mesh = {} if model.devices.ways is None else {"mesh": model.devices.ways}
    return {**_dense_identity(model.path, model.config, model.kernels.name, model.kv_dtype), **sparse, **mesh}


def _dense_identity(path: Path, config: ModelConfig, kernels_name: str, kv_dtype: str) -> dict[str, object]:
    """`identity` of a dense model on one device, which need not be loaded."""
    stat, status = path.stat(), kernels.status()
    return {
        "version": VERSION, "file": path.name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns,
        "cpu": cpu_info()["model"], "device": status["device"], "threads": status["threads"], "kernels": kernels_name,
        "isa": status["isa"], "kv_dtype": kv_dtype, "context": config.context_length,
        **({"window": config.window} if config.window else {}),
    }  # fmt: skip


def path_of(model: Model) -> Path:
    return _file_for(model.path, identity(model))


def _file_for(path: Path, valid_for: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(valid_for, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "costs" / f"{path.stem}-{digest}.json"


def load(model: Model) -> CostTable | None:
    """The kept table; None without one, or if the file cannot be read. Processes that share the model have one."""
    table = _read(path_of(model))
    found = hosts.agreed(table and table.to_dict())
    return None if found is None else CostTable.from_dict(found)


def find(path: Path, config: ModelConfig, *, kv_dtype: str = "f16") -> CostTable | None:
    """`load` for a dense model that is not loaded, as it would be loaded without options."""
    return _read(_file_for(path, _dense_identity(path, config, kernels.get().name, kv_dtype)))


def _read(path: Path) -> CostTable | None:
    try:
        return CostTable.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save(model: Model, table: CostTable) -> CostTable:
    """Keeps a table and returns it. If the cache cannot be written, the table is measured again next time.

    Processes that share the model measured each its own; process 0's counts.
    """
    if hosts.leads():
        with contextlib.suppress(UserError), atomically(path_of(model)) as file:
            file.write(json.dumps(table.to_dict(), indent=1).encode())
    return CostTable.from_dict(hosts.agreed(table.to_dict()))


GUESSED_V = {
    "avx2": (1.0, 1.08, 1.19, 1.3, 1.55, 1.75, 1.95, 2.15),  # between a quiet and a busy hour (docs/vn.md)
    "avx512": (1.0, 1.08, 1.15, 1.22, 1.3, 1.39, 1.5, 1.63),
    "batched": (1.0, 1.1),  # the xla backend and accelerators
    "row by row": (1.0, 2.0),  # the reference kernels
}
"""v(1).. of a small model (SmolLM2-135M Q4_1)."""
GUESSED_KV = {"avx2": (0.6, 0.24), "avx512": (0.75, 0.22), "batched": (1.0, 0.0), "row by row": (0.0, 0.5)}
"""The cost of a token in the cache, in bytes of weights: to a round for each byte of its keys and values, to a row for
each of its multiply-adds there (SmolLM2-135M behind 8,000 tokens, docs/LOG.md)."""
STEP_FLOOR = 0.02
"""Cost of a drafted token besides reading weights, as a share of a plain step: small calls and the draw."""


def guessed_v(backend: str, rows: int) -> list[float]:
    """v(1)..v(rows) if nothing was measured: no draft is far cheaper or dearer. Beyond these by the last slope."""
    known = GUESSED_V[_kind(backend)]
    slope = known[-1] - known[-2]
    return [known[n] if n < len(known) else known[-1] + slope * (n + 1 - len(known)) for n in range(rows)]


def guessed_kv(model: Model) -> dict[str, float]:
    """`kv` and `kv_row` if nothing was measured."""
    c, (by_byte, by_product) = model.config, GUESSED_KV[_kind(model.kernels.name)]
    endless = LayerWindows.from_config(c).endless * 1000 * c.n_layers / max(model.footprint.file, 1)
    held = 2 * c.n_kv_heads * c.head_dim * jnp.dtype(model.cache_dtype).itemsize
    return {"kv": endless * by_byte * held, "kv_row": endless * by_product * 2 * c.n_heads * c.head_dim}


def _kind(backend: str) -> str:
    if backend == "native":
        return "avx512" if kernels.status()["isa"] in ("avx512", "amx") else "avx2"
    return "batched" if backend in ("xla", "packed", "bf16") else "row by row"


def policy_times(
    model: Model,
    gamma: int,
    name: str | None,
    options: Mapping[str, object] | None = None,
    *,
    share: float = 0.0,
    kv_share: float = 0.0,
    levels: int | None = None,
    batch: int = 1,
) -> dict[str, object]:
    """The options `v`, `c`, `c0`, `kv`, `kv_row` and `kv_draft` of the policies `cost` and `auto_off`: as kept on this
    machine, else a guess.

    Args:
        gamma: most tokens of a draft.
        name, options: of the drafter, whose cost may have been kept; None if the name is not known.
        share: c if it was not kept.
        kv_share: of what a row of the target reads of a text, what drafting a token reads.
        levels: of the trees it drafts, which take the time of a token each; None for chains.
        batch: sequences that are decoded together; times are in their steps.
    """
    table = load(model)
    if table is None:
        guess = enumerate(guessed_v(model.kernels.name, batch * (gamma + 1)), 1)
        rows = [max(time, model.footprint.v(n)) for n, time in guess]  # more rows wake more experts
        found: dict[str, Any] = {"v": [t / rows[batch - 1] for t in rows[batch - 1 :: batch]], "c": share, "c0": 0.0}
        found |= {key: batch * time / rows[batch - 1] for key, time in guessed_kv(model).items()}
        found["kv_draft"] = kv_share * (found["kv"] + found["kv_row"])
    else:
        key = None if name is None else cost_key(name, options)
        found = table.policy_options(gamma, key, kv_share=kv_share, batch=batch)
        if key not in table.drafts:
            found["c"] = share
    return rounded(found if levels is None else by_levels(found, levels, gamma))


def by_levels(times: Mapping[str, Any], levels: int, nodes: int) -> dict[str, Any]:
    """The options for trees of so many nodes that take the time of a token for each level, whole or not at all."""
    return {**times, "c": 0.0, "c0": times["c0"] + levels * times["c"], "kv_draft": times["kv_draft"] * levels / nodes}


def rounded(times: Mapping[str, Any]) -> dict[str, object]:
    """Options with two decimals, those a thousand tokens with two digits, so that a program is not compiled anew for
    every digit."""

    def short(key: str, x: float) -> float:
        return float(f"{x:.2g}") if key.startswith("kv") else round(x, 2)

    return {key: [short(key, t) for t in x] if isinstance(x, list) else short(key, x) for key, x in times.items()}
