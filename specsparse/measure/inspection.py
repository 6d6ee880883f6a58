"""What a model file is: its facts, tensors and traffic, what it could do here, and how two files fit as a pair."""

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np

from specsparse.data.devices import Device
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.measure.costs.roofline import Roofline, Traffic
from specsparse.speculative import expected, vocab
from specsparse.speculative.drafters.heads import dflash_file, eagle3_file
from specsparse.speculative.drafters.heads.dflash_file import DFlashFile
from specsparse.speculative.drafters.heads.eagle3_file import Eagle3File
from specsparse.speculative.drafters.heads.published_file import EMBEDDING, OUTPUT
from specsparse.speculative.intersection import intersect
from specsparse.support.files import Json

FLOAT_TYPES = ("F32", "F16", "BF16")
KV_LENGTH = 128
"""Tokens in the cache where a rate is given without another length."""
ALPHAS = (0.5, 0.7, 0.9)
_LONGEST = 100  # characters of a value that are shown


@dataclass(frozen=True)
class Inspected:
    """A file and what could be made of it.

    Attributes:
        file: open.
        config, tokenizer: None where the file does not run here.
        problem: why not, in one line; None where it runs.
        head: of a file that holds a draft head.
    """

    file: GGUFFile
    config: ModelConfig | None
    tokenizer: Tokenizer | None
    problem: str | None = None
    head: Eagle3File | DFlashFile | None = None


_OWN = {EMBEDDING: "embedding", OUTPUT: "output matrix"}
_HEADS = {module.ARCHITECTURE: module.read_gguf for module in (dflash_file, eagle3_file)}


def look_at(f: GGUFFile) -> Inspected:
    """The config and the tokenizer of an open file, the head in it, or why it has none that runs here."""
    try:
        read_head = _HEADS.get(f.get("general.architecture", "str", ""))
        if read_head is not None:
            return Inspected(f, None, None, head=read_head(f))
        config = ModelConfig.from_gguf(f)
        return Inspected(f, config, Tokenizer.from_metadata(f.metadata, where=str(f.path)))
    except UserError as error:
        return Inspected(f, None, None, str(error).removeprefix(f"{f.path}: "))


def metadata(f: GGUFFile) -> dict[str, str]:
    """Every key with its value as one line; long arrays and texts are cut, and say how long they are."""
    return {key: _shown(value) for key, value in f.metadata.items()}


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray | list):
        first = [item.item() if isinstance(item, np.generic) else item for item in value[:8]]
        text = "[" + ", ".join(_cut(repr(item), 24) for item in first)
        return f"{text}, ..] ({len(value)})" if len(value) > len(first) else f"{text}]"
    if isinstance(value, str):
        return _cut(repr(value)[1:-1], _LONGEST) + (f" ({len(value)} characters)" if len(value) > _LONGEST else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 2] + ".."


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one role (`blk.*.attn_q.weight`), type and shape.

    Attributes:
        name: with the layer's number as a star.
        type: GGUF type.
        shape: numpy order.
        count: tensors.
        nbytes: of all of them.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    count: int
    nbytes: int


def tensor_groups(f: GGUFFile, *, each: bool = False) -> list[TensorGroup]:
    """The tensors of a file in its order, those of all layers together unless `each`."""
    found: dict[tuple, list[int]] = {}
    for t in f.tensors.values():
        name = t.name if each else re.sub(r"^blk\.\d+\.", "blk.*.", t.name)
        found.setdefault((name, t.type.name, t.shape), []).append(t.nbytes)
    return [TensorGroup(*key, count=len(sizes), nbytes=sum(sizes)) for key, sizes in found.items()]


def sizes(f: GGUFFile, *, layers_only: bool = False) -> Json:
    """Weights, bytes, bits per weight and bytes by type, the most first, of all tensors or of those of the layers."""
    tensors = [t for t in f.tensors.values() if t.name.startswith("blk.") or not layers_only]
    weights, nbytes = sum(prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    by_type: Counter[str] = Counter()
    for t in tensors:
        by_type[t.type.name] += t.nbytes
    bits = 8 * nbytes / weights if weights else 0.0
    return {"weights": weights, "bytes": nbytes, "bits_per_weight": bits, "bytes_by_type": dict(by_type.most_common())}


def main_type(f: GGUFFile) -> str:
    """The type that most bytes of the file's layers are in."""
    return next(iter(sizes(f, layers_only=True)["bytes_by_type"]), "F32")


def model_facts(config: ModelConfig) -> dict[str, str]:
    """The shape of the model, a line each."""
    rope = config.rope
    heads = f"{config.n_heads} of {config.head_dim}"
    if config.n_kv_heads != config.n_heads:
        heads += f", {config.n_kv_heads} for keys and values"
    scaling = "" if rope.scaling == "none" else f", {rope.scaling} x{rope.factor:g} from {rope.original_context}"
    return {
        "architecture": f"{config.architecture}, {config.n_layers} layers, width {config.d_model}, FFN {config.d_ff}",
        "heads": heads,
        "context": f"{config.context_length} tokens, RoPE base {rope.base:g} ({rope.pairing}){scaling}"
        + (", frequency factors" if rope.freq_factors else ""),
        "FFN": config.activation + ("" if config.gated else " without a gate") + _sparse(config),
        **_layers(config),
        "output": "the embedding" if config.tied_output else "a matrix of its own",
    }


def _layers(config: ModelConfig) -> dict[str, str]:
    """What the layers of this architecture have beside the plain Llama's, where there is anything."""
    kinds, family = [config.kind(i) for i in range(config.n_layers)], config.family
    windowed, unrotated = sum(k.window > 0 for k in kinds), sum(config.ropes[k.table] is None for k in kinds)
    found = {
        f"a window of {config.window} tokens on {windowed} of {len(kinds)}": windowed,
        f"RoPE base {config.local_rope.base:g} there" if config.local_rope else "": config.local_rope,
        f"no RoPE on {unrotated} of {len(kinds)}": unrotated,
        "norms of queries and keys": family.qk_norm,
        "norms behind attention and FFN": family.post_norms,
    }
    said = ", ".join(text for text, there in found.items() if there)
    return {"layers": said} if said else {}


def _sparse(config: ModelConfig) -> str:
    ranks = config.predictor_ranks
    return f", predictors of rank {min(ranks)} to {max(ranks)}" if ranks else ""


def head_facts(file: Eagle3File | DFlashFile) -> dict[str, str]:
    """The shape of an EAGLE-3 head or a DFlash drafter and what it is for, a line each."""
    facts, options = _eagle3_facts(file) if isinstance(file, Eagle3File) else _dflash_facts(file)
    own = [what for name, what in _OWN.items() if name in file.tensors]
    facts["of its own"] = " and ".join(own) or "neither embedding nor output matrix: the target's"
    facts["options"] = ", ".join(options) or "none"
    if file.accept_k > 1:
        lossy = f"verifier_accept_k={file.accept_k}: lossy where it is honoured; here drafts are verified without loss"
        facts["verifier"] = lossy
    return facts


def _eagle3_facts(file: Eagle3File) -> tuple[dict[str, str], list[str]]:
    """Facts of the head alone, and the options that are set."""
    s = file.shape
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
    facts = {
        "head": f"EAGLE-3, width {s.width}, FFN {s.d_ff}, {s.heads} heads of {s.head_dim}, {s.kv_heads} for keys",
        "target": f"{file.target or 'not named'}, width {file.target_width}, {file.vocab_size} ids",
        "features": f"what enters layers {', '.join(map(str, file.layers)) or '2, L/2 and L - 3 of the target'}",
        "scores": f"{file.vocab_size if file.ids is None else len(file.ids)} ids",
    }
    return facts, [flag for flag in flags if getattr(s, flag)]


def _dflash_facts(file: DFlashFile) -> tuple[dict[str, str], list[str]]:
    """As `_eagle3_facts`, of a block drafter."""
    s = file.shape
    rows = file.tensors[OUTPUT][0] if OUTPUT in file.tensors else None
    scored = rows if file.ids is None else len(file.ids)
    facts = {
        "head": f"DFlash, {s.layers} layers of width {s.width}, FFN {s.d_ff}, {s.heads} heads of {s.head_dim}, "
        f"{s.kv_heads} for keys",
        "target": f"{file.target or 'not named'}, width {s.feature_width}",
        "features": f"what enters layers {', '.join(map(str, s.features))}",
        "block": f"{file.block_size} rows, {file.drafts} tokens drafted, mask token {file.mask_token}",
        "scores": "all ids of the target" if scored is None else f"{scored} ids",
    }
    windows = [window for window in s.windows if window is not None]
    options = {
        f"a window of {' and '.join(map(str, sorted({*windows})))} on {len(windows)} of {s.layers}": windows,
        f"causal inside the block on {sum(s.causal)} of {s.layers}": any(s.causal),
        "sample_from_anchor": file.from_anchor,
        f"embedding_scale={file.embedding_scale:g}": file.embedding_scale != 1.0,
        f"logit_scale={file.logit_scale:g}": file.logit_scale != 1.0,
        f"softcap={file.softcap:g}": file.softcap > 0,
    }
    return facts, [text for text, there in options.items() if there]


def tokenizer_facts(tokenizer: Tokenizer, *, template: bool) -> dict[str, str]:
    """The tokenizer, a line each."""
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("bos", "eos", "eot")}
    shown = [f"{name} {i} {tokenizer.token_text(i)!r}" for name, i in ids.items() if i is not None]
    adds = [name.upper() for name in ("bos", "eos") if getattr(tokenizer, f"add_{name}")]
    return {
        "tokenizer": f"{tokenizer.type}, {tokenizer.vocab_size} tokens, adds {' and '.join(adds) or 'nothing'}",
        "special": ", ".join(shown) or "none",
        "chat template": "yes" if template else "no",
    }


def rates(found: Inspected, device: Device, *, kv_dtype: str = "f16", kv_length: int = KV_LENGTH) -> Json:
    """What a token costs in bytes, and how many a second `device` could do at best.

    Returns:
        weight_bytes and kv_bytes of one token after `kv_length` others, kv_bytes_per_position, tokens_per_second,
        prompt_tokens_per_second (of 512) and v8, the time of an 8-row forward over that of one.

    Raises:
        UserError: the file does not run here.
    """
    load = _traffic(found, kv_dtype)
    roofline = Roofline(device, load)
    return {
        "kv_length": kv_length,
        "weight_bytes": load.weight_bytes,
        "kv_bytes": load.read_bytes(1, kv_length) - load.weight_bytes,
        "kv_bytes_per_position": load.kv_bytes_per_token,
        "tokens_per_second": roofline.tokens_per_second(kv_length),
        "prompt_tokens_per_second": 512 / roofline.forward_s(512),
        "v8": roofline.v(8, kv_length),
    }


def _traffic(found: Inspected, kv_dtype: str = "f16") -> Traffic:
    if found.config is None:
        why = found.problem or "is a draft head, not a model"
        raise UserError(f"{found.file.path}: does not run here: {why}")
    return Traffic.from_gguf(found.file, found.config, kv_dtype=kv_dtype)


def pair(target: Inspected, draft: Inspected, device: Device, *, kv_length: int = KV_LENGTH) -> Json:
    """How `draft` would do as the draft model of `target`.

    Returns:
        differences (of the vocabularies, `vocab.VocabDifference` each) and fits (none of them); only_special, whether
        special_tokens=target would settle them; intersection, where they do not fit, the tokens that both have
        (`Intersection.facts`) and overlap, the same in a line; cost, a drafted token in plain steps of the target; and
        speedups, a list of {alpha, gamma, speedup} by the roofline of `device` (Leviathan et al. 2211.17192, theorem
        3.8).

    Raises:
        UserError: one of the files does not run here.
    """
    big, small = (Roofline(device, _traffic(found)) for found in (target, draft))
    assert target.tokenizer is not None and draft.tokenizer is not None
    differences = vocab.compare(target.tokenizer, draft.tokenizer)
    common = None
    if differences:
        assert target.config is not None and draft.config is not None
        sizes = {"target_size": target.config.vocab_size, "draft_size": draft.config.vocab_size}
        common = intersect(target.tokenizer, draft.tokenizer, **sizes)
    cost = small.forward_s(1, kv_length) / big.forward_s(1, kv_length)
    speedups = []
    for alpha in ALPHAS:
        gamma, speedup = expected.best_gamma(alpha, lambda n: big.v(n, kv_length), c=cost)
        speedups.append({"alpha": alpha, "gamma": gamma, "speedup": speedup})
    return {
        "fits": not differences,
        "only_special": bool(differences) and all(d.special for d in differences),
        "differences": differences,
        "intersection": None if common is None else common.facts(),
        "overlap": None if common is None else common.sentence(),
        "cost": cost,
        "speedups": speedups,
    }


def report(found: Inspected, device: Device, *, draft: Inspected | None = None, each: bool = False) -> Json:
    """Everything above as plain values; what needs a model that runs is None where it does not."""
    f = found.file
    out: Json = {
        "file": str(f.path),
        "format": {"magic": f.magic.decode(), "version": f.version, "alignment": f.alignment},
        "runs_here": found.problem is None,
        "problem": found.problem,
        "metadata": metadata(f),
        "tensors": [vars(group) for group in tensor_groups(f, each=each)],
        "sizes": sizes(f),
        "model": None if found.config is None else model_facts(found.config),
        "head": None if found.head is None else head_facts(found.head),
        "tokenizer": None,
        "rates": None if found.config is None else rates(found, device),
        "pair": None,
    }
    if found.tokenizer is not None:
        out["tokenizer"] = tokenizer_facts(found.tokenizer, template="tokenizer.chat_template" in f.metadata)
    if draft is not None:
        both = pair(found, draft, device)
        out["pair"] = {"draft": str(draft.file.path), **both, "differences": [vars(d) for d in both["differences"]]}
    return out
