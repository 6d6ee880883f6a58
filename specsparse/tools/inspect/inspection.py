"""A model file: its facts, tensors and traffic, its speed here at best, and how two files fit as a pair."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table
from rich.text import Text

from specsparse.data.devices import Device
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.measure.costs.roofline import Roofline, Traffic
from specsparse.models.convert.heads import head_facts
from specsparse.speculative import expected, vocab
from specsparse.speculative.drafters.heads import dspark, eagle3
from specsparse.speculative.drafters.heads.dflash import DFlashFile
from specsparse.speculative.drafters.heads.eagle3 import Eagle3File
from specsparse.speculative.vocab import intersect
from specsparse.support import tables
from specsparse.support.files import Json

KV_LENGTH = 128
"""Tokens in the cache."""
ALPHAS = (0.5, 0.7, 0.9)
_HEADS = {"dflash": dspark.read_gguf, "dspark": dspark.read_gguf, "eagle3": eagle3.read_gguf}
_MOST_DIFFERENCES = 8


@dataclass(frozen=True)
class Inspected:
    """An open file with its config and tokenizer, or its head, or the reason why it has neither."""

    file: GGUFFile
    config: ModelConfig | None = None  # None if the file does not run here
    tokenizer: Tokenizer | None = None
    problem: str | None = None  # why it does not run, in one line
    head: Eagle3File | DFlashFile | None = None  # of a file that holds a draft head

    @classmethod
    def from_gguf(cls, f: GGUFFile) -> "Inspected":
        """The config and the tokenizer of an open file, the head in it, or why it has none that runs here."""
        try:
            read_head = _HEADS.get(f.get("general.architecture", "str", ""))
            if read_head is not None:
                return cls(f, head=read_head(f))
            config = ModelConfig.from_gguf(f)
            return cls(f, config, Tokenizer.from_metadata(f.metadata, where=str(f.path)))
        except UserError as error:
            return cls(f, problem=str(error).removeprefix(f"{f.path}: "))

    def roofline(self, device: Device) -> Roofline:
        """The model on a device; UserError if the file does not run here."""
        if self.config is None:
            why = self.problem or "is a draft head, not a model"
            raise UserError(f"{self.file.path}: does not run here: {why}")
        return Roofline(device, Traffic.from_gguf(self.file, self.config))


def report(found: Inspected, device: Device, *, draft: Inspected | None = None, each: bool = False) -> Json:
    """Everything as plain values; facts that need a model that runs are None if it does not.

    `draft` is judged as its draft model; with `each` tensors stand one by one, else those of all layers together
    (`blk.*.attn_q.weight`).
    """
    f, runs, tensors = found.file, found.config is not None, dict[tuple, list[int]]()
    for t in f.tensors.values():
        name = t.name if each else re.sub(r"^blk\.\d+\.", "blk.*.", t.name)
        tensors.setdefault((name, t.type.name, t.shape), []).append(t.nbytes)
    return {
        "file": str(f.path),
        "format": {"magic": f.magic.decode(), "version": f.version, "alignment": f.alignment},
        "runs_here": found.problem is None,
        "problem": found.problem,
        "metadata": {key: _shown(value) for key, value in f.metadata.items()},
        "tensors": [
            {"name": name, "type": kind, "shape": shape, "count": len(sizes), "nbytes": sum(sizes)}
            for (name, kind, shape), sizes in tensors.items()
        ],
        "sizes": f.sizes(),
        "model": model_facts(found.config) if found.config else None,
        "head": None if found.head is None else head_facts(found.head),
        "tokenizer": _tokenizer_facts(found.tokenizer, f) if found.tokenizer else None,
        "rates": _rates(found.roofline(device)) if runs else None,
        "pair": None if draft is None else _pair(found, draft, device),
    }


def _shown(value: object) -> str:
    """A metadata value in a line of bounded length."""

    def cut(text: str, most: int) -> str:
        return text if len(text) <= most else text[: most - 2] + ".."

    if isinstance(value, np.ndarray | list):
        first = [item.item() if isinstance(item, np.generic) else item for item in value[:8]]
        text = "[" + ", ".join(cut(repr(item), 24) for item in first)
        return f"{text}, ..] ({len(value)})" if len(value) > len(first) else f"{text}]"
    if isinstance(value, str):
        return cut(repr(value)[1:-1], 100) + (f" ({len(value)} characters)" if len(value) > 100 else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def model_facts(config: ModelConfig) -> dict[str, str]:
    """The shape of the model, a line each; "layers" if they have more than the plain Llama's."""
    rope, ranks, n = config.rope, config.predictor_ranks, config.n_layers
    heads = f"{config.n_heads} of {config.head_dim}"
    if config.n_kv_heads != config.n_heads:
        heads += f", {config.n_kv_heads} for keys and values"
    scaling = "" if rope.scaling == "none" else f", {rope.scaling} x{rope.factor:g} from {rope.original_context}"
    factors = ", frequency factors" if rope.freq_factors else ""
    ffn = config.activation + ("" if config.gated else " without a gate")
    if config.n_experts:
        how = {"softmax": "softmax", "sigmoid": "sigmoid", "chosen": "logits, softmax of the chosen"}[config.gating]
        ffn += f", {config.n_chosen} of {config.n_experts} experts by {how}"
    kinds = [config.kind(i) for i in range(n)]
    windowed, unrotated = sum(k.window > 0 for k in kinds), sum(config.ropes[k.table] is None for k in kinds)
    more = {
        f"a window of {config.window} tokens on {windowed} of {n}": windowed,
        f"RoPE base {config.local_rope.base:g} there" if config.local_rope else "": config.local_rope,
        f"no RoPE on {unrotated} of {n}": unrotated,
        "norms of queries and keys" + " as a whole" * (config.family.qk_norm == "whole"): config.family.qk_norm,
        "sinks": config.family.sinks,
        "a router that reads what enters the layer": config.family.routing and config.family.routing.early,
        "norms behind attention and FFN": config.family.post_norms,
    }
    layers = ", ".join(text for text, there in more.items() if there)
    return {
        "architecture": f"{config.architecture}, {n} layers, width {config.d_model}, FFN {config.d_ff}",
        "heads": heads,
        "context": f"{config.context_length} tokens, RoPE base {rope.base:g} ({rope.pairing}){scaling}{factors}",
        "FFN": ffn + (f", predictors of rank {min(ranks)} to {max(ranks)}" if ranks else ""),
        **({"layers": layers} if layers else {}),
        "output": "the embedding" if config.tied_output else "a matrix of its own",
    }


def _tokenizer_facts(tokenizer: Tokenizer, f: GGUFFile) -> dict[str, str]:
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("bos", "eos", "eot")}
    shown = [f"{name} {i} {tokenizer.token_text(i)!r}" for name, i in ids.items() if i is not None]
    adds = [name.upper() for name in ("bos", "eos") if getattr(tokenizer, f"add_{name}")]
    return {
        "tokenizer": f"{tokenizer.type}, {tokenizer.vocab_size} tokens, adds {' and '.join(adds) or 'nothing'}",
        "special": ", ".join(shown) or "none",
        "chat template": "yes" if "tokenizer.chat_template" in f.metadata else "no",
    }


def _rates(roofline: Roofline) -> Json:
    """Bytes that a token reads after `KV_LENGTH` others, and how many a second the device could do at best.

    `prompt_tokens_per_second` is of 512, and `v8` the time of a forward of 8 rows over that of one. `rows_bytes` are
    weights that some rows read in one forward, if experts are chosen by chance; empty for a dense model.
    """
    load = roofline.traffic
    return {
        "kv_length": KV_LENGTH,
        "weight_bytes": load.weight_bytes,
        "rows_bytes": {str(n): load.read_weights(n) for n in (2, 4, 8) if load.read_weights(n) > load.weight_bytes},
        "kv_bytes": load.read_bytes(1, KV_LENGTH) - load.weight_bytes,
        "kv_bytes_per_position": load.kv_bytes_per_token,
        "tokens_per_second": roofline.tokens_per_second(KV_LENGTH),
        "prompt_tokens_per_second": 512 / roofline.forward_s(512),
        "v8": roofline.v(8, KV_LENGTH),
    }


def _pair(target: Inspected, draft: Inspected, device: Device) -> Json:
    """The fit of `draft` as the draft model of `target`. UserError: one of the files does not run here.

    Returns:
        draft; differences of the vocabularies and fits (there are none); only_special, whether special_tokens=target
        would settle them; intersection, the tokens that both have if they do not fit, and overlap, the same in a line;
        cost, a drafted token in plain steps of the target; and speedups, a list of {alpha, gamma, speedup} by the
        roofline of `device` (Leviathan et al. 2211.17192, theorem 3.8).
    """
    big, small = target.roofline(device), draft.roofline(device)
    assert target.config and draft.config and target.tokenizer and draft.tokenizer
    differences, common = vocab.compare(target.tokenizer, draft.tokenizer), None
    if differences:
        sizes = {"target_size": target.config.vocab_size, "draft_size": draft.config.vocab_size}
        common = intersect(target.tokenizer, draft.tokenizer, **sizes)
    cost = small.forward_s(1, KV_LENGTH) / big.forward_s(1, KV_LENGTH)
    speedups = []
    for alpha in ALPHAS:
        gamma, speedup = expected.best_gamma(alpha, lambda n: big.v(n, KV_LENGTH), c=cost)
        speedups.append({"alpha": alpha, "gamma": gamma, "speedup": speedup})
    return {
        "draft": str(draft.file.path),
        "fits": not differences,
        "only_special": bool(differences) and all(d.special for d in differences),
        "differences": [vars(d) for d in differences],
        "intersection": None if common is None else common.facts(),
        "overlap": None if common is None else common.sentence(),
        "cost": cost,
        "speedups": speedups,
    }


def parts(report: Json, device: str) -> Iterator[Table | str]:
    size, form = report["sizes"], report["format"]
    yield f"{report['file']}: {form['magic']} version {form['version']}"
    yield pairs("metadata", report["metadata"])
    yield _table(("tensor", "type", "shape", "count", "size"), (
        (Text(g["name"]), g["type"], " x ".join(map(str, g["shape"])), str(g["count"]), _mib(g["nbytes"]))
        for g in report["tensors"]
    ))  # fmt: skip
    yield f"{size['weights'] / 1e6:.1f} M weights, {_mib(size['bytes'])}, {size['bits_per_weight']:.2f} bits a weight"
    yield "  " + ", ".join(f"{name} {_mib(n)}" for name, n in size["bytes_by_type"].items())
    if report["head"]:
        yield pairs("head", report["head"])
        yield f"drafts for its target: drafter={report['head']['drafter']} drafter.path={report['file']}"
        return
    if report["problem"]:
        yield f"does not run here: {report['problem']}"
        return
    yield pairs("model", {**report["model"], **(report["tokenizer"] or {})})
    rates = report["rates"]
    cache = f"{_mib(rates['kv_bytes'])} of cache after {rates['kv_length']} tokens"
    yield f"a token reads {_mib(rates['weight_bytes'])} of weights and {cache}"
    if rates["rows_bytes"]:
        more = ", ".join(f"{n}: {_mib(size)}" for n, size in rates["rows_bytes"].items())
        yield f"tokens in one pass, with experts chosen by chance, read {more}"
    yield (
        f"at best {rates['tokens_per_second']:.0f} tok/s decoding, {rates['prompt_tokens_per_second']:.0f} tok/s of "
        f"prompt, 8 tokens in one pass {rates['v8']:.2f} times as long as one ({device})"
    )
    yield "measured: python -m specsparse bench, python -m specsparse.run +experiment=roofline"
    if report["pair"]:
        yield from _pair_parts(report["pair"], device)


def _pair_parts(pair: Json, device: str) -> Iterator[Table | str]:
    yield f"\n{pair['draft']} as its draft model"
    if pair["fits"]:
        yield "the vocabularies fit"
    else:
        shown = pair["differences"][:_MOST_DIFFERENCES]
        yield _table(("differs", "target", "draft"), ((d["what"], d["target"], d["draft"]) for d in shown))
        left = len(pair["differences"]) - _MOST_DIFFERENCES
        tli = "drafter.vocabulary=tli drafts the tokens that both have, slem goes by way of text"
        hint = f"they do not fit: {tli}"
        if pair["only_special"]:
            hint = "drafter.special_tokens=target goes on with the target's ids"
        yield (f"and {left} more; " if left > 0 else "") + hint
        yield pair["overlap"]
    yield f"a drafted token costs {pair['cost']:.2f} of a plain step, by the roofline of {device}"
    for row in pair["speedups"]:
        gain = f"speed-up {row['speedup']:.2f} with gamma {row['gamma']}" if row["gamma"] else "no draft pays"
        yield f"  at acceptance {row['alpha']:g}: {gain}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 0.1 * 2**20 else f"{nbytes / 1024:.1f} KiB"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    left = [i for i, name in enumerate(columns) if name not in ("shape", "count", "size")]
    return tables.new(*columns, rows=rows, left=left, wrap=range(len(columns)))


def pairs(title: str, values: Mapping[str, str]) -> Table:
    return _table((title, ""), ((Text(key), Text(value)) for key, value in values.items()))
