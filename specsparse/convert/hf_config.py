"""config.json of a Llama-family checkpoint -> GGUF metadata, and the frequency factors of Llama 3."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specsparse.engine.config import ACTIVATION_KEY
from specsparse.errors import UserError

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
"""Classes of transformers, and the architecture that GGUF files call them."""
_ACTIVATIONS = {"silu": None, "swish": None, "relu": "relu"}
_MISSING: Any = object()


@dataclass(frozen=True)
class HfConfig:
    """config.json as this converter reads it.

    Attributes:
        where: the file, for messages.
        values: as it is.
    """

    where: Path
    values: Mapping[str, Any]

    def get(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """A value of that type (an int counts as a float); null counts as missing.

        Raises:
            UserError: it is missing and has no default, or is of another type.
        """
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise UserError(f"{self.where}: has no {key}")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{self.where}: {key} is {value!r:.60}, not of type {kind.__name__}")
        return value

    @property
    def architecture(self) -> str:
        """The architecture's name in GGUF; UserError where it is not supported."""
        names = self.get("architectures", list, [])
        name = names[0] if names else None
        if name not in ARCHITECTURES:
            raise UserError(f"{self.where}: architecture {name} is not supported; there are {', '.join(ARCHITECTURES)}")
        return ARCHITECTURES[name]

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.get("num_attention_heads", int)

    @property
    def n_kv_heads(self) -> int:
        """Key and value heads."""
        return self.get("num_key_value_heads", int, self.n_heads)

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        width = self.get("hidden_size", int)
        return self.get("head_dim", int, width // self.n_heads if self.n_heads > 0 else 0)

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return self.get("tie_word_embeddings", bool, False)

    @property
    def rope(self) -> Mapping[str, Any]:
        """Scaling of the rotary embedding, in the old place or the new one; {} for none."""
        found = self.get("rope_parameters", dict, None) or self.get("rope_scaling", dict, {})
        return {**found, "type": found.get("rope_type", found.get("type", "default"))}

    @property
    def rope_base(self) -> float:
        """Theta."""
        found = self.rope.get("rope_theta")
        return float(found) if isinstance(found, int | float) else self.get("rope_theta", float, 10000.0)


def metadata(config: HfConfig, *, name: str) -> dict[str, Any]:
    """GGUF keys of the model, without those of its tokenizer.

    Raises:
        UserError: a key is missing or of another type, or asks for what is not supported: another architecture,
            activation or scaling of the rotary embedding, or a sliding window.
    """
    a, head_dim = config.architecture, config.head_dim
    width, context = config.get("hidden_size", int), config.get("max_position_embeddings", int)
    window = config.get("sliding_window", int, None)
    if window is not None and window < context and config.get("use_sliding_window", bool, a == "llama"):
        raise UserError(f"{config.where}: sliding_window={window} is not supported: attention here sees all tokens")
    keys: dict[str, Any] = {
        "general.architecture": a,
        "general.type": "model",
        "general.name": name,
        f"{a}.vocab_size": config.get("vocab_size", int),
        f"{a}.context_length": context,
        f"{a}.embedding_length": width,
        f"{a}.block_count": config.get("num_hidden_layers", int),
        f"{a}.feed_forward_length": config.get("intermediate_size", int),
        f"{a}.attention.head_count": config.n_heads,
        f"{a}.attention.head_count_kv": config.n_kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", float),
        f"{a}.rope.freq_base": config.rope_base,
        f"{a}.rope.dimension_count": head_dim,
    }
    if head_dim * config.n_heads != width:
        keys |= {f"{a}.attention.key_length": head_dim, f"{a}.attention.value_length": head_dim}
    return keys | _scaling(config, a, context) | _activation(config)


def _activation(config: HfConfig) -> dict[str, str]:
    name = config.get("hidden_act", str, "silu")
    if name not in _ACTIVATIONS:
        raise UserError(f"{config.where}: hidden_act={name} is not supported; there are {', '.join(_ACTIVATIONS)}")
    return {ACTIVATION_KEY: _ACTIVATIONS[name]} if _ACTIVATIONS[name] else {}


def _scaling(config: HfConfig, a: str, context: int) -> dict[str, Any]:
    kind = config.rope["type"]
    if kind in ("default", "llama3"):  # Llama 3's is in a tensor
        return {}
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{config.where}: rope scaling {kind!r} is not supported; there are default, linear, llama3, yarn"
        )
    keys = {f"{a}.rope.scaling.type": kind, f"{a}.rope.scaling.factor": _number(config, "factor")}
    if kind == "yarn":
        original = int(_number(config, "original_max_position_embeddings", float(context)))
        keys[f"{a}.rope.scaling.original_context_length"] = original
    return keys


def _number(config: HfConfig, key: str, default: float | None = None) -> float:
    """A positive number of the rope scaling."""
    value = config.rope.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{config.where}: rope scaling has {key}={value!r:.40}, a positive number is needed")
    return float(value)


def frequency_factors(config: HfConfig) -> np.ndarray | None:
    """What Llama 3.1 divides the angle of each pair by, float32[head_dim / 2]; None for another scaling.

    Pairs that turn more than high_freq_factor times over the original context keep their angle, those that turn less
    than low_freq_factor times are divided by the factor, and those between mix both (Llama 3 report, arXiv:2407.21783;
    `rope_freqs.weight` of llama.cpp).

    Raises:
        UserError: one of the numbers is missing or not positive, or the two bounds are equal.
    """
    if config.rope["type"] != "llama3":
        return None
    factor = _number(config, "factor")
    low, high = _number(config, "low_freq_factor"), _number(config, "high_freq_factor")
    original = _number(config, "original_max_position_embeddings")
    if low == high:
        raise UserError(f"{config.where}: rope scaling has low_freq_factor = high_freq_factor = {low:g}")
    half = config.head_dim // 2
    turns = original * config.rope_base ** (-2.0 * np.arange(half) / config.head_dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)
