"""What a model file is: its facts, tensors and traffic, what it could do here, and how two files fit as a pair."""

import re
from dataclasses import dataclass

import numpy as np

from specsparse.data.devices import Device
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.measure.costs.roofline import Roofline, Traffic
from specsparse.models.convert.heads import head_facts
from specsparse.speculative import expected, vocab
from specsparse.speculative.drafters.heads import dflash, eagle3
from specsparse.speculative.drafters.heads.dflash import DFlashFile
from specsparse.speculative.drafters.heads.eagle3 import Eagle3File
from specsparse.speculative.intersection import intersect
from specsparse.support.files import Json

KV_LENGTH = 128
"""Tokens in the cache."""
ALPHAS = (0.5, 0.7, 0.9)
_LONGEST = 100  # characters of a value that are shown
_HEADS = {module.ARCHITECTURE: module.read_gguf for module in (dflash, eagle3)}


@dataclass(frozen=True)
class Inspected:
    """A file and what could be made of it.

    Attributes:
        file: open.
        config, tokenizer: None if the file does not run here.
        problem: why not, in one line; None if it runs.
        head: of a file that holds a draft head.
    """

    file: GGUFFile
    config: ModelConfig | None = None
    tokenizer: Tokenizer | None = None
    problem: str | None = None
    head: Eagle3File | DFlashFile | None = None

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
        """Of the model on a device.

        Raises:
            UserError: the file does not run here.
        """
        if self.config is None:
            why = self.problem or "is a draft head, not a model"
            raise UserError(f"{self.file.path}: does not run here: {why}")
        return Roofline(device, Traffic.from_gguf(self.file, self.config))


def report(found: Inspected, device: Device, *, draft: Inspected | None = None, each: bool = False) -> Json:
    """Everything as plain values; what needs a model that runs is None if it does not.

    Args:
        found: the file.
        device: to estimate for.
        draft: a draft model to judge beside it.
        each: whether tensors stand one by one, and not those of all layers together.
    """
    f = found.file
    return {
        "file": str(f.path),
        "format": {"magic": f.magic.decode(), "version": f.version, "alignment": f.alignment},
        "runs_here": found.problem is None,
        "problem": found.problem,
        "metadata": {key: _shown(value) for key, value in f.metadata.items()},
        "tensors": _tensor_groups(f, each=each),
        "sizes": f.sizes(),
        "model": None if found.config is None else model_facts(found.config),
        "head": None if found.head is None else head_facts(found.head),
        "tokenizer": None if found.tokenizer is None else _tokenizer_facts(found.tokenizer, f),
        "rates": None if found.config is None else _rates(found.roofline(device)),
        "pair": None if draft is None else _pair(found, draft, device),
    }


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


def _tensor_groups(f: GGUFFile, *, each: bool) -> list[Json]:
    """The tensors in their order, those of one role (`blk.*.attn_q.weight`), type and shape together unless `each`."""
    found: dict[tuple, list[int]] = {}
    for t in f.tensors.values():
        name = t.name if each else re.sub(r"^blk\.\d+\.", "blk.*.", t.name)
        found.setdefault((name, t.type.name, t.shape), []).append(t.nbytes)
    return [
        {"name": name, "type": kind, "shape": shape, "count": len(sizes), "nbytes": sum(sizes)}
        for (name, kind, shape), sizes in found.items()
    ]


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
    """What the layers of this architecture have beside the plain Llama's, if anything."""
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

    `prompt_tokens_per_second` is of 512, and `v8` the time of a forward of 8 rows over that of one.
    """
    load = roofline.traffic
    return {
        "kv_length": KV_LENGTH,
        "weight_bytes": load.weight_bytes,
        "kv_bytes": load.read_bytes(1, KV_LENGTH) - load.weight_bytes,
        "kv_bytes_per_position": load.kv_bytes_per_token,
        "tokens_per_second": roofline.tokens_per_second(KV_LENGTH),
        "prompt_tokens_per_second": 512 / roofline.forward_s(512),
        "v8": roofline.v(8, KV_LENGTH),
    }


def _pair(target: Inspected, draft: Inspected, device: Device) -> Json:
    """How `draft` would do as the draft model of `target`.

    Returns:
        draft; differences of the vocabularies and fits (none of them); only_special, whether special_tokens=target
        would settle them; intersection, the tokens that both have if they do not fit, and overlap, the same in a line;
        cost, a drafted token in plain steps of the target; and speedups, a list of {alpha, gamma, speedup} by the
        roofline of `device` (Leviathan et al. 2211.17192, theorem 3.8).

    Raises:
        UserError: one of the files does not run here.
    """
    big, small = target.roofline(device), draft.roofline(device)
    assert target.config and draft.config and target.tokenizer and draft.tokenizer
    differences = vocab.compare(target.tokenizer, draft.tokenizer)
    common = None
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
