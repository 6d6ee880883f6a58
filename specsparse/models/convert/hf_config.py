"""config.json of a Llama-family checkpoint -> GGUF metadata."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsparse.engine.config import ACTIVATION_KEY
from specsparse.errors import UserError
from specsparse.models.convert.hf_rope import HfRope, said
from specsparse.support.json_files import Json

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
    values: Json

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
    def rope(self) -> HfRope:
        """The rotary embedding, its scaling in the old place or the new one."""
        found = self.get("rope_parameters", dict, None) or self.get("rope_scaling", dict, {})
        partial = {"partial_rotary_factor": self.get("partial_rotary_factor", float, None)}
        base = found.get("rope_theta")
        return HfRope(
            self.where,
            self.architecture,
            partial | found,
            base=float(base) if isinstance(base, int | float) else self.get("rope_theta", float, 10000.0),
            dim=self.head_dim,
            context=self.get("max_position_embeddings", int),
            pretrained=self.get("original_max_position_embeddings", int, None),
        )


def metadata(config: HfConfig, *, name: str) -> Json:
    """GGUF keys of the model, without those of its tokenizer.

    Raises:
        UserError: a key is missing or of another type, or asks for what is not supported: another architecture,
            activation or rotary embedding, or a sliding window.
    """
    a, head_dim, rope = config.architecture, config.head_dim, config.rope
    width, context = config.get("hidden_size", int), rope.context
    window = config.get("sliding_window", int, None)
    if window is not None and window < context and config.get("use_sliding_window", bool, a == "llama"):
        raise UserError(f"{config.where}: sliding_window={window} is not supported: attention here sees all tokens")
    keys: Json = {
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
        f"{a}.rope.freq_base": rope.base,
        f"{a}.rope.dimension_count": head_dim,
    }
    if head_dim * config.n_heads != width:
        keys |= {f"{a}.attention.key_length": head_dim, f"{a}.attention.value_length": head_dim}
    return keys | {f"{a}.{key}": value for key, value in said(rope).keys.items()} | _activation(config)


def notes(config: HfConfig) -> list[str]:
    """What other programs will not run as the file says, a line each."""
    activation, rope = _activation(config).get(ACTIVATION_KEY), said(config.rope).note
    silu = (
        f"hidden_act={activation} is in the file under our own key {ACTIVATION_KEY}: llama.cpp does not read it and "
        "runs this file with SiLU, which gives other logits"
    )
    return ([silu] if activation else []) + ([rope] if rope else [])


def _activation(config: HfConfig) -> dict[str, str]:
    name = config.get("hidden_act", str, "silu")
    if name not in _ACTIVATIONS:
        raise UserError(f"{config.where}: hidden_act={name} is not supported; there are {', '.join(_ACTIVATIONS)}")
    return {ACTIVATION_KEY: _ACTIVATIONS[name]} if _ACTIVATIONS[name] else {}
