"""config.json of a checkpoint of transformers -> GGUF metadata."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsparse.engine.config import ACTIVATION_KEY
from specsparse.errors import UserError
from specsparse.models.convert.hf_classes import ACTIVATIONS, CLASSES, HfClass, class_name
from specsparse.models.convert.hf_rope import HfRope, said
from specsparse.support.json_files import Json

_MISSING: Any = object()
_MOST = 1e12


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
            UserError: it is missing and has no default, is of another type, or is a number that is not finite.
        """
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise UserError(f"{self.where}: has no {key}")
            return default
        if kind is float and type(value) is int and abs(value) < _MOST:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{self.where}: {key} is {value!r:.60}, not of type {kind.__name__}")
        if kind is float and not math.isfinite(value):
            raise UserError(f"{self.where}: {key} is {value}, a finite number is needed")
        return value

    def size(self, key: str, default: Any = _MISSING, most: int = 1 << 24) -> int:
        """A whole number in 1..most.

        Raises:
            UserError: as `get`, or it is out of range.
        """
        value = self.get(key, int, default)
        if not 1 <= value <= most:
            raise UserError(f"{self.where}: {key} is {value!r:.60}, 1 to {most} is allowed")
        return value

    def eps(self, default: Any = _MISSING) -> float:
        """The epsilon of RMS norms, above 0 and up to 1.

        Raises:
            UserError: as `get`, or it is out of range.
        """
        value = self.get("rms_norm_eps", float, default)
        if not 0 < value <= 1:
            raise UserError(f"{self.where}: rms_norm_eps is {value:g}, a number above 0 and up to 1 is needed")
        return value

    def theta(self, table: Json, default: float) -> float:
        """The base of a rotary embedding: that of its table, else the one beside it.

        Raises:
            UserError: it is no number above 1.
        """
        base = HfConfig(self.where, table).get("rope_theta", float, None)
        return self._base(self.get("rope_theta", float, default) if base is None else base)

    def _base(self, base: float) -> float:
        if not 1 < base <= _MOST:
            raise UserError(f"{self.where}: rope_theta is {base:g}, a number above 1 and up to {_MOST:g} is needed")
        return base

    @property
    def form(self) -> HfClass:
        """What its class means; UserError where that is not supported."""
        self.get("architectures", list, [])
        name = class_name(self.values)
        if name not in CLASSES:
            raise UserError(
                f"{self.where}: architecture {name}{self._odd()} is not supported; there are {', '.join(CLASSES)}"
            )
        return CLASSES[name]

    def _odd(self) -> str:
        """What a model that is not supported has that is none of a plain transformer's, in brackets."""
        keys = self.values.keys()
        found = ["experts"] if keys & {"num_experts", "num_local_experts", "n_routed_experts"} else []
        recurrent = any(key.startswith(("ssm_", "mamba_", "linear_", "conv_L")) for key in keys) or "state_size" in keys
        found += ["recurrent layers"] if recurrent else []
        found += ["a vision or audio part"] if keys & {"vision_config", "audio_config"} else []
        return f" (a model with {' and '.join(found)})" if found else ""

    @property
    def architecture(self) -> str:
        """The architecture's name in GGUF; UserError where it is not supported."""
        return self.form.architecture

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
        width = self.size("hidden_size")
        return self.size("head_dim", width // self.n_heads if self.n_heads > 0 else 0)

    @property
    def tied(self) -> bool:
        """Whether the output matrix is the embedding."""
        return self.get("tie_word_embeddings", bool, self.form.tied)

    @property
    def rope(self) -> HfRope:
        """The rotary embedding of layers that see all tokens, its scaling in the old place or the new one."""
        found = self._ropes.get("full_attention", self._ropes)
        if not isinstance(found, dict):
            raise UserError(f"{self.where}: rope_parameters.full_attention is {found!r:.60}, not a table")
        partial = {"partial_rotary_factor": self.get("partial_rotary_factor", float, None)}
        return HfRope(
            self.where,
            self.architecture,
            partial | found,
            base=self.theta(found, self.form.rope_base),
            dim=self.head_dim,
            context=self.get("max_position_embeddings", int),
            pretrained=self.get("original_max_position_embeddings", int, None),
        )

    @property
    def _ropes(self) -> Json:
        return self.get("rope_parameters", dict, None) or self.get("rope_scaling", dict, {})

    def local_rope_base(self) -> float | None:
        """Theta of the layers with a window, None where they have no other than all layers.

        Raises:
            UserError: it is no number, or those layers have a scaling.
        """
        usual = self.form.family.local_rope_base
        if usual is None:
            return None
        own = self._ropes.get("sliding_attention", {})
        table = own if isinstance(own, dict) else {"rope_type": own}
        if table.get("rope_type", "default") != "default":
            raise UserError(f"{self.where}: RoPE of the layers with a window is {own!r:.60}: only a base is supported")
        base = HfConfig(self.where, table).get("rope_theta", float, None)
        return self._base(self.get("rope_local_base_freq", float, usual) if base is None else base)

    def window(self) -> int | None:
        """Tokens that a layer with a window sees; None where all see all.

        Raises:
            UserError: there is one that GGUF files of this architecture do not have.
        """
        family, window = self.form.family, self.get("sliding_window", int, None)
        if family.window == "must":
            return self.get("sliding_window", int)
        if window is None or not self.get("use_sliding_window", bool, self.form.windowed):
            return None
        if window >= self.get("max_position_embeddings", int):
            return None
        if family.window == "never" or not self.form.windowed:
            raise UserError(f"{self.where}: sliding_window={window} is not supported for {self.architecture}")
        return window

    def full_every(self) -> int:
        """With a window, of how many layers one sees all tokens; 0: none does.

        Raises:
            UserError: the layers that see all tokens are not every n-th.
        """
        n_layers, usual = self.get("num_hidden_layers", int), self.form.family.full_every
        named = self.get("sliding_window_pattern", int, self.get("_sliding_window_pattern", int, usual))
        kinds = self.get("layer_types", list, None)
        if kinds is None:
            return named
        full = _KINDS[True]
        every = kinds.index(full) + 1 if full in kinds else named if named > n_layers else 0
        if kinds != [_KINDS[every > 0 and (i + 1) % every == 0] for i in range(n_layers)]:
            raise UserError(f"{self.where}: layer_types are not supported: every n-th layer may see all tokens")
        return every

    def check_layers(self) -> None:
        """Refuses what a GGUF file of this architecture cannot say of its layers.

        Raises:
            UserError: other layers without RoPE than every n-th, logits that are capped, another scale of queries, or
                attention to later tokens.
        """
        n_layers, family = self.get("num_hidden_layers", int), self.form.family
        if not 1 <= n_layers <= _MOST_LAYERS:
            raise UserError(f"{self.where}: num_hidden_layers is {n_layers}; 1 to {_MOST_LAYERS} is allowed")
        if every := family.unrotated_every:
            usual = [int((i + 1) % every != 0) for i in range(n_layers)]
            interval = self.get("no_rope_layer_interval", int, every)
            given = self.get("no_rope_layers", list, usual if interval == every else [])
            if given != usual:
                raise UserError(f"{self.where}: only every {every}th layer without RoPE is supported (no_rope_layers)")
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self.values.get(key) is not None:
                raise UserError(f"{self.where}: {key} is not supported")
        if self.get("use_bidirectional_attention", bool, False):
            raise UserError(f"{self.where}: use_bidirectional_attention is not supported: only causal models are")
        by_width = n_layers == family.width_scaled_layers
        scalar = self.get("hidden_size", int) / max(self.n_heads, 1) if by_width else self.head_dim
        if self.get("query_pre_attn_scalar", float, float(scalar)) != scalar:
            raise UserError(f"{self.where}: query_pre_attn_scalar is not supported: {scalar:g} is needed at this size")


_MOST_LAYERS = 1 << 14
_KINDS = {False: "sliding_attention", True: "full_attention"}


def metadata(config: HfConfig, *, name: str) -> Json:
    """GGUF keys of the model, without those of its tokenizer.

    Raises:
        UserError: a key is missing or of another type, or asks for what is not supported: another architecture,
            activation, rotary embedding or sliding window.
    """
    a, head_dim, rope = config.architecture, config.head_dim, config.rope
    width = config.get("hidden_size", int)
    keys: Json = {
        "general.architecture": a,
        "general.type": "model",
        "general.name": name,
        f"{a}.vocab_size": config.get("vocab_size", int),
        f"{a}.context_length": rope.context,
        f"{a}.embedding_length": width,
        f"{a}.block_count": config.get("num_hidden_layers", int),
        f"{a}.feed_forward_length": config.get("intermediate_size", int),
        f"{a}.attention.head_count": config.n_heads,
        f"{a}.attention.head_count_kv": config.n_kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": config.eps(),
        f"{a}.rope.freq_base": rope.base,
        f"{a}.rope.dimension_count": head_dim,
    }
    config.check_layers()
    if head_dim * config.n_heads != width:
        keys |= {f"{a}.attention.key_length": head_dim, f"{a}.attention.value_length": head_dim}
    own = {**said(rope).keys, **_window(config)}
    return keys | {f"{a}.{key}": value for key, value in own.items()} | _activation(config)


def _window(config: HfConfig) -> Json:
    """Keys of a sliding window, the usual ones of an architecture left out."""
    family, window = config.form.family, config.window()
    if window is None:
        return {}
    every, base = config.full_every(), config.local_rope_base()
    keys: Json = {"attention.sliding_window": window}
    if every != family.full_every:
        if every == 0 or family.full_every == 0:
            raise UserError(f"{config.where}: layer_types are not supported for {config.architecture}")
        keys["attention.sliding_window_pattern"] = every
    return keys | ({"rope.freq_base_swa": base} if base != family.local_rope_base else {})


def notes(config: HfConfig, biases: Sequence[str]) -> list[str]:
    """What other programs will not run as the file says, a line each; `biases` are those that the file has."""
    activation, rope, family = _activation(config).get(ACTIVATION_KEY), said(config.rope).note, config.form.family
    unread = [key for key in _window(config) if family.window == "may" or key != "attention.sliding_window"]
    other = (
        f"hidden_act={activation} is in the file under our own key {ACTIVATION_KEY}: llama.cpp does not read it and "
        f"runs this file with {_SPOKEN[family.activation]}, which gives other logits"
    )
    window = (
        f"{', '.join(unread)} of {config.architecture} files: not every llama.cpp reads it; one that does not gives "
        "other logits on long texts"
    )
    unknown = [] if config.architecture == "llama" else [name for name in biases if name not in family.biases]
    bias = (
        f"biases of {', '.join(unknown)}: llama.cpp has no place for them in {config.architecture} files and refuses "
        "to load this one; specsparse runs it"
    )
    found = ((other, activation), (rope, rope), (window, unread), (bias, unknown))
    return [line for line, why in found if line and why]


_SPOKEN = {"silu": "SiLU", "gelu_tanh": "GELU"}


def _activation(config: HfConfig) -> dict[str, str]:
    key, usual = config.form.activation_key, config.form.family.activation
    name = config.get(key, str, None)
    if name is not None and name not in ACTIVATIONS:
        raise UserError(f"{config.where}: {key}={name} is not supported; there are {', '.join(ACTIVATIONS)}")
    found = usual if name is None else ACTIVATIONS[name]
    return {ACTIVATION_KEY: found} if found != usual else {}
