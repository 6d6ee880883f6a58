"""config.json of a checkpoint of transformers -> GGUF metadata: classes, sizes, windows, the rotary embedding."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsparse.engine.architectures import ARCHITECTURES, Architecture
from specsparse.engine.config import ACTIVATION_KEY, GATINGS, MAX_CONTEXT
from specsparse.engine.rope import RopeConfig, angles
from specsparse.errors import UserError, refuse
from specsparse.models.convert.write import size_keys
from specsparse.support.files import Json


@dataclass(frozen=True)
class HfClass:
    """A class of transformers: its meaning of config.json and of the tensors, if its architecture leaves it open."""

    architecture: str  # its name in GGUF files
    model_type: str  # `model_type` of a config.json without `architectures`
    tied: bool = False  # whether the output matrix is the embedding, if config.json does not say it
    rope_base: float = 10000.0  # theta, if it does not say it
    activation_key: str = "hidden_act"  # of config.json
    # whether `sliding_window` of config.json counts without `use_sliding_window`; Llama's class ignores it
    windowed: bool = False
    norms_from_one: bool = False  # norms are stored less one

    @property
    def family(self) -> Architecture:
        return ARCHITECTURES[self.architecture]


CLASSES: Mapping[str, HfClass] = {
    "LlamaForCausalLM": HfClass("llama", "llama"),
    "MistralForCausalLM": HfClass("llama", "mistral", windowed=True),
    "Qwen2ForCausalLM": HfClass("qwen2", "qwen2"),
    "Qwen3ForCausalLM": HfClass("qwen3", "qwen3"),
    "SmolLM3ForCausalLM": HfClass("smollm3", "smollm3", tied=True, rope_base=2e6),
    "GraniteForCausalLM": HfClass("granite", "granite"),
    "Olmo2ForCausalLM": HfClass("olmo2", "olmo2"),
    "Phi3ForCausalLM": HfClass("phi3", "phi3", windowed=True),
    "Qwen3MoeForCausalLM": HfClass("qwen3moe", "qwen3_moe"),
    "OlmoeForCausalLM": HfClass("olmoe", "olmoe"),
    "GptOssForCausalLM": HfClass("gpt-oss", "gpt_oss", rope_base=150000.0, windowed=True),
    "SmallThinkerForCausalLM": HfClass("smallthinker", "smallthinker", tied=True, rope_base=1e6),  # not in transformers
    "Gemma3ForCausalLM": HfClass(
        "gemma3", "gemma3_text", tied=True, rope_base=1e6, activation_key="hidden_activation", windowed=True,
        norms_from_one=True,
    ),
}  # fmt: skip
"""Classes of transformers by name."""


class TextPart(NamedTuple):
    """The text model in a checkpoint of a model that sees images too."""

    hf_class: str  # its name in `CLASSES`
    model_type: str  # of a config.json without `architectures`
    defaults: Mapping[str, object]  # transformers' own values, which `text_config` may leave out
    left_out: tuple[str, ...]  # the beginnings of the names of other parts' tensors


TEXT_PARTS: Mapping[str, TextPart] = {
    "Gemma3ForConditionalGeneration": TextPart(
        "Gemma3ForCausalLM",
        "gemma3",
        {
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        ("vision_tower.", "multi_modal_projector."),
    ),
}  # fmt: skip
"""Classes of transformers that hold a text model among other parts."""
_OF_MODEL_TYPE = {known.model_type: name for name, known in [*CLASSES.items(), *TEXT_PARTS.items()]}


def read_json(path: Path, *, optional: bool = False) -> Json:
    """A JSON object; {} for a file that is not there and need not be. UserError: it is missing, or no JSON object."""
    if optional and not path.exists():
        return {}
    try:
        found, why = json.loads(path.read_text(encoding="utf-8")), "holds no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        found, why = None, f"cannot be read: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}"
    if not isinstance(found, dict):
        raise UserError(f"{path}: {why}")
    return found


def class_name(config: Json) -> str | None:
    """The class of transformers that a config.json is of, known here or not; None if it names none."""
    names, model_type = config.get("architectures"), config.get("model_type")
    if isinstance(names, list) and names:
        return names[0] if isinstance(names[0], str) else None
    return _OF_MODEL_TYPE.get(model_type, model_type) if isinstance(model_type, str) else None


ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of transformers, and ours."""
ROPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "partial_rotary_factor", "finetuned",
}  # fmt: skip
"""Keys of the scaling that transformers reads for one kind or another, and one that changes nothing."""
_MAX = 1e12
_MISSING: Any = object()


@dataclass(frozen=True)
class HfConfig:
    """config.json, or a table of it, as this converter reads it."""

    where: Path  # the file, for messages
    values: Json  # its table

    def get(
        self, key: str, kind: type, default: Any = _MISSING, *, low: float = -math.inf, most: float = math.inf
    ) -> Any:
        """A value of that type (an int counts as a float), of numbers one above `low` and up to `most`.

        Null counts as missing. A UserError if it is missing and has no default, of another type, not finite or out of
        range.
        """
        value = self.values.get(key)
        if value is None and default is None:
            return None
        value = default if value is None and default is not _MISSING else value
        if kind is float and type(value) is int and abs(value) < _MAX:
            value = float(value)
        if type(value) is kind and (kind not in (int, float) or (low < value <= most and math.isfinite(value))):
            return value
        wrong = f"has no {key}" if value is None else f"{key} is {value!r:.60}, not of type {kind.__name__}"
        if type(value) is kind:
            shown = f"{value:g}" if kind is float else f"{value!r:.60}"
            needed = "a finite number" if most == math.inf else f"a number above {low:.12g} and up to {most:.12g}"
            if kind is int:
                needed = f"a whole number from {low + 1} to {most}"
            wrong = f"{key} is {shown}, {needed} is needed"
        raise UserError(f"{self.where}: {wrong}")

    def size(self, key: str, default: Any = _MISSING, most: int = 1 << 24) -> int:
        """A whole number in 1..most; UserError as in `get`."""
        return self.get(key, int, default, low=0, most=most)

    def eps(self, default: Any = _MISSING) -> float:
        """The epsilon of the norms; UserError as in `get`."""
        return self.get("rms_norm_eps", float, default, low=0.0, most=1.0)

    def need(self, **only: object) -> None:
        """UserError if a key is there with another value than the one that is supported; None: with any."""
        for key, value in only.items():
            found = self.values.get(key)
            found = ACTIVATIONS.get(found, found) if key == "hidden_act" and isinstance(found, str) else found
            if found is not None and (value is None or found != value):
                needed = "" if value is None else f": only {value} is"
                raise UserError(f"{self.where}: {key}={found!s:.40} is not supported{needed}")

    def theta(self, table: Json, key: str, default: float) -> float:
        """The base of a rotary embedding: `rope_theta` of its table, else `key` beside it; UserError as in `get`."""
        if table.get("rope_theta") is not None:
            return HfConfig(self.where, table).get("rope_theta", float, low=1.0, most=_MAX)
        return self.get(key, float, default, low=1.0, most=_MAX)

    def rotation(self, table: Json, architecture: str, *, base: float, dim: int, context: int) -> "HfRope":
        """The rotary embedding of a table of this config; `base` is theta if neither says it. UserError: a value is of
        another type or out of range."""
        partial = {"partial_rotary_factor": self.get("partial_rotary_factor", float, None)}
        base = self.theta(table, "rope_theta", base)
        pretrained = self.get("original_max_position_embeddings", int, None)
        return HfRope(HfConfig(self.where, partial | table), architecture, base, dim, context, pretrained)

    @property
    def ropes(self) -> Json:
        """The table of scalings, in the new place or the old one."""
        return self.get("rope_parameters", dict, None) or self.get("rope_scaling", dict, {})

    @property
    def hf_class(self) -> HfClass:
        """The class of the model; UserError if it is not supported, with what is not a plain transformer's."""
        self.get("architectures", list, [])
        name, keys = class_name(self.values), self.values.keys()
        if name in CLASSES:
            return CLASSES[name]
        recurrent = any(key.startswith(("ssm_", "mamba_", "linear_", "conv_L")) for key in keys) or "state_size" in keys
        parts = {
            "experts": keys & {"num_experts", "num_local_experts", "n_routed_experts"},
            "recurrent layers": recurrent,
            "a vision or audio part": keys & {"vision_config", "audio_config"},
        }
        found = " and ".join(part for part, there in parts.items() if there)
        odd = f" (a model with {found})" if found else ""
        raise UserError(f"{self.where}: architecture {name}{odd} is not supported; there are {', '.join(CLASSES)}")

    @property
    def architecture(self) -> str:
        return self.hf_class.architecture

    @property
    def n_heads(self) -> int:
        return self.get("num_attention_heads", int)

    @property
    def n_kv_heads(self) -> int:
        return self.get("num_key_value_heads", int, self.n_heads)

    @property
    def head_dim(self) -> int:
        width = self.size("hidden_size")
        return self.size("head_dim", width // self.n_heads if self.n_heads > 0 else 0)

    @property
    def n_experts(self) -> int:
        names = ("num_experts", "num_local_experts", "moe_num_primary_experts")
        return self.size(next((name for name in names if name in self.values), names[0]))

    @property
    def tied(self) -> bool:
        return self.get("tie_word_embeddings", bool, self.hf_class.tied)

    @property
    def rope(self) -> "HfRope":
        """The rotary embedding of layers that see all tokens."""
        table = HfConfig(self.where, self.ropes).get("full_attention", dict, self.ropes)
        context = self.get("max_position_embeddings", int)
        return self.rotation(table, self.architecture, base=self.hf_class.rope_base, dim=self.head_dim, context=context)


@dataclass(frozen=True)
class HfRope:
    """A rotary embedding as transformers computes it."""

    table: HfConfig  # rope_parameters or rope_scaling
    # of the GGUF file. llama.cpp reads frequency factors in "llama" files only, and in no file of these architectures
    # the bounds of YaRN's ramp (src/llama-model.cpp of July 2026)
    architecture: str
    base: float  # theta
    dim: int  # elements of a head
    context: int  # max_position_embeddings
    # original_max_position_embeddings outside the table, which comes first; None without one
    pretrained: int | None = None

    def number(self, key: str, default: Any = _MISSING, *, low: float = 1e-6) -> float:
        """A number of the table; no real one comes near the bounds."""
        return self.table.get(key, float, default, low=low, most=1e9)

    @property
    def original(self) -> int:
        """Trained positions; UserError if there are none, or more than any model has."""
        key = "original_max_position_embeddings"
        positions = self.pretrained or int(self.number(key, float(self.context)))
        return HfConfig(self.table.where, {key: positions}).size(key, most=MAX_CONTEXT)

    @property
    def plain(self) -> np.ndarray:
        """Radians per position without a scaling, float64[dim / 2]."""
        return self.base ** (-2.0 * np.arange(self.dim // 2) / self.dim)


class GgufRope(NamedTuple):
    keys: Json  # without the architecture before them
    # `rope_freqs.weight`, the divisors of the pairs' angles, float32[dim / 2], or None
    factors: np.ndarray | None = None
    note: str | None = None  # a line on what another program does not read of it; None if all read the same


def gguf_rope(rope: HfRope) -> GgufRope:
    """Keys and factors of a rotary embedding. UserError: an unknown kind or key, a number that is missing or out of
    range, or GGUF cannot say it."""
    table = rope.table.values
    kind = table.get("rope_type", table.get("type", "default"))
    unknown = sorted(key for key, value in table.items() if key not in _ROPE_KEYS and value is not None)
    if kind not in ROPES or unknown:
        what = f" with {unknown[0]}" if unknown else ""
        raise UserError(
            f"{rope.table.where}: rope scaling {kind!r}{what} is not supported; there are {', '.join(ROPES)}"
        )
    rope.table.need(partial_rotary_factor=1.0)
    match kind:
        case "linear":
            return GgufRope({"rope.scaling.type": "linear", "rope.scaling.factor": rope.number("factor")})
        case "llama3":
            return GgufRope({}, _llama3_factors(rope))
        case "yarn":
            return _yarn(rope)
        case _:
            return GgufRope({})


def _llama3_factors(rope: HfRope) -> np.ndarray:
    """Llama 3.1's divisors of the pairs' angles, float32[dim / 2].

    Pairs that turn more than high_freq_factor times over the original context keep their angle, those that turn less
    than low_freq_factor times are divided by the factor, and those between mix both (Llama 3 report, arXiv:2407.21783;
    `rope_freqs.weight` of llama.cpp).
    """
    factor, low, high = (rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if rope.pretrained is None:
        rope.number("original_max_position_embeddings")
    if low >= high:
        raise UserError(f"{rope.table.where}: low_freq_factor={low:g} must be below high_freq_factor={high:g}")
    smooth = np.clip((rope.original * rope.plain / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def _yarn(rope: HfRope) -> GgufRope:
    """YaRN (arXiv:2309.00071, eq. 13 and 14) as transformers computes it: its keys if their readers compute the same
    angles, else the same angles as frequency factors.

    llama.cpp takes `attn_factor` beside its own 1 + 0.1 ln(factor), rounds the ramp's bounds, and has 32 and 1 turns
    for them whatever a file of these architectures says.
    """
    factor = rope.number("factor", rope.context / rope.original, low=0.999999)
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)

    # Angles float64[dim / 2]: a ramp between those without a scaling and those divided by the factor.
    truncate = rope.table.get("truncate", bool, True)
    turns = np.array([fast, slow])
    low, high = rope.dim * np.log(rope.original / (turns * 2 * np.pi)) / (2 * np.log(rope.base))
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, rope.dim - 1.0)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    wanted = rope.plain / factor * ramp + rope.plain * (1.0 - ramp)

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    # The factor of cos and sin.
    magnitude = grown(1.0)
    if rope.table.values.get("attention_factor") is not None:
        magnitude = rope.number("attention_factor")
    elif rope.table.values.get("mscale") and rope.table.values.get("mscale_all_dim"):
        magnitude = grown(rope.number("mscale")) / grown(rope.number("mscale_all_dim"))

    def same_angles(config: RopeConfig) -> bool:
        return np.allclose(angles(config)[0], wanted, rtol=1e-6, atol=0.0)

    rounds = ARCHITECTURES[rope.architecture].rounds_yarn
    plain = RopeConfig(rope.base, rope.dim, "neox", "yarn", factor, rope.original, rounds_yarn=rounds)
    attention = "rope.scaling.attn_factor"
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": rope.original,
        **({} if math.isclose(magnitude, grown(1.0), rel_tol=1e-6) else {attention: magnitude / grown(1.0)}),
    }
    if same_angles(plain):
        return GgufRope(keys)
    if rope.architecture == "llama":
        return GgufRope({attention: magnitude}, (rope.plain / wanted).astype(np.float32))
    if same_angles(replace(plain, beta_fast=fast, beta_slow=slow)):
        return GgufRope(
            keys | {"rope.scaling.yarn_beta_fast": fast, "rope.scaling.yarn_beta_slow": slow},
            note=f"llama.cpp reads no beta_fast={fast:g}, beta_slow={slow:g} in {rope.architecture} files and runs 32 "
            "and 1; specsparse runs what the file says",
        )
    what = f"beta_fast={fast:g}, beta_slow={slow:g}" if truncate == rounds else f"truncate={str(truncate).lower()}"
    raise UserError(
        f"{rope.table.where}: rope scaling 'yarn' with {what} has no place in a {rope.architecture} GGUF file"
    )


def metadata(config: HfConfig, *, name: str) -> Json:
    """GGUF keys of the model, without those of its tokenizer. UserError: a key is missing or of another type, or asks
    for what is not supported: another architecture, activation, rotary embedding, sliding window, or layers that a GGUF
    file of this architecture cannot say."""
    a, family, head_dim, rope = config.architecture, config.hf_class.family, config.head_dim, config.rope
    width, n_layers = config.get("hidden_size", int), config.size("num_hidden_layers", most=1 << 14)
    keys = {"general.type": "model"} | size_keys(
        a,
        name,
        vocab=config.get("vocab_size", int),
        context=rope.context,
        width=width,
        layers=n_layers,
        ffn=config.get("moe_ffn_hidden_size" if family.only_window else "intermediate_size", int),
        heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        eps=config.eps(),
        base=rope.base,
        dim=head_dim,
    )
    if (every := family.unrotated_every) and not family.full_every:
        usual = [int((i + 1) % every != 0) for i in range(n_layers)]
        interval = config.get("no_rope_layer_interval", int, every)
        if config.get("no_rope_layers", list, usual if interval == every else []) != usual:
            raise UserError(f"{config.where}: only every {every}th layer without RoPE is supported (no_rope_layers)")
    by_width = n_layers == family.width_scaled_layers
    scalar = width / max(config.n_heads, 1) if by_width else head_dim
    config.need(
        attn_logit_softcapping=None, final_logit_softcapping=None, use_bidirectional_attention=False,
        query_pre_attn_scalar=scalar,
    )  # fmt: skip
    if head_dim * config.n_heads != width:
        keys |= {f"{a}.attention.key_length": head_dim, f"{a}.attention.value_length": head_dim}
    own = {**gguf_rope(rope).keys, **_window_keys(config), **_multiplier_keys(config)}
    own |= _expert_keys(config)
    return keys | {f"{a}.{key}": value for key, value in own.items()} | _activation(config)


def _window_keys(config: HfConfig) -> Json:
    """Keys of a sliding window but for the usual ones of an architecture; {} if all layers see all tokens."""
    hf_class, family, get = config.hf_class, config.hf_class.family, config.get
    if family.only_window:
        return _layouts(config)
    window = get("sliding_window", int, None)
    if family.window == "must":
        window = get("sliding_window", int)
    elif (
        window is None
        or not get("use_sliding_window", bool, hf_class.windowed)
        or window >= get("max_position_embeddings", int)
    ):
        return {}

    # Every n-th layer sees all tokens; 0: no layer does.
    n_layers, kinds = get("num_hidden_layers", int), get("layer_types", list, None)
    every = get("sliding_window_pattern", int, get("_sliding_window_pattern", int, family.full_every))
    told = True
    if kinds is not None:
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else every if every > n_layers else 0
        full = [every > 0 and (i + 1) % every == 0 for i in range(n_layers)]
        told = kinds == ["full_attention" if sees_all else "sliding_attention" for sees_all in full]
    base, own = family.local_rope_base, config.ropes.get("sliding_attention", {})
    table = own if isinstance(own, dict) else {"rope_type": own}
    refuse({
        f"sliding_window={window} is not supported for {config.architecture}":
            family.window == "never" or not hf_class.windowed,
        "layer_types are not supported: every n-th layer may see all tokens":
            not told or (every != family.full_every and 0 in (every, family.full_every)),
        f"RoPE of the layers with a window is {own!r:.60}: only a base is supported":
            base is not None and table.get("rope_type", "default") != "default",
    }, config.where)  # fmt: skip
    keys: Json = {"attention.sliding_window": window}
    if every != family.full_every:
        keys["attention.sliding_window_pattern"] = every
    if base is not None and (local := config.theta(table, "rope_local_base_freq", base)) != base:
        keys["rope.freq_base_swa"] = local
    return keys


def _layouts(config: HfConfig) -> Json:
    """The window of a SmallThinker, whose config says of each layer whether it has one, and whether it has RoPE."""
    family, n_layers = config.hf_class.family, config.size("num_hidden_layers")
    window, rotated = (config.get(key, list, []) for key in ("sliding_window_layout", "rope_layout"))
    usual = [int(not family.is_nth(i, family.full_every)) for i in range(n_layers)]
    if not any(window) and all(rotated):
        return {}
    if window != usual or rotated != usual:
        which = f"a window, and RoPE, on all layers but every {family.full_every}th from the first"
        raise UserError(f"{config.where}: sliding_window_layout, rope_layout: only {which} is supported")
    config.need(sliding_window_size=family.only_window)
    return {"attention.sliding_window": family.only_window}


def _multiplier_keys(config: HfConfig) -> Json:
    names = {
        "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    }  # fmt: skip
    multipliers = config.hf_class.family.multipliers
    return {key: config.get(name, float, 1.0, low=0.0) for key, name in names.items()} if multipliers else {}


def _expert_keys(config: HfConfig) -> Json:
    """The keys of a model with experts; UserError if they are not as its architecture has them."""
    routing, get, values = config.hf_class.family.routing, config.get, config.values
    if routing is None:
        return {}
    own_names = "moe_num_primary_experts" in values  # SmallThinker's
    width = "moe_ffn_hidden_size" if own_names else "intermediate_size"
    dense = 0 in get("moe_layer_layout", list, []) or get("mlp_only_layers", list, [])
    if dense or get("decoder_sparse_step", int, 1) != 1:
        raise UserError(f"{config.where}: dense layers among those with experts are not supported")
    config.need(
        clip_qkv=None, swiglu_limit=7.0, swiglu_alpha=1.702,
        moe_shared_primary_experts=0, moe_enable_secondary_experts=False, moe_enable_early_router=True,
        use_qk_norm=False,
    )  # fmt: skip
    normalised = get("norm_topk_prob", bool, own_names)
    if normalised != routing.normalised:
        raise UserError(f"{config.where}: norm_topk_prob={normalised} is not supported for {config.architecture}")
    keys = {
        "expert_count": config.n_experts,
        "expert_used_count": config.size("moe_num_active_primary_experts" if own_names else "num_experts_per_tok"),
        "expert_feed_forward_length": config.size("moe_intermediate_size", config.size(width)),
    }
    if routing.gating is None:
        gating = "softmax" if get("moe_primary_router_apply_softmax", bool, False) else "sigmoid"
        keys["expert_gating_func"] = GATINGS.index(gating)
    return keys


def _activation(config: HfConfig) -> dict[str, str]:
    key, usual = config.hf_class.activation_key, config.hf_class.family.activation
    if config.hf_class.family.routing:
        config.need(hidden_act="relu" if usual == "relu" else "silu")
        return {}
    name = config.get(key, str, None)
    if name is not None and name not in ACTIVATIONS:
        raise UserError(f"{config.where}: {key}={name} is not supported; there are {', '.join(ACTIVATIONS)}")
    found = usual if name is None else ACTIVATIONS[name]
    return {ACTIVATION_KEY: found} if found != usual else {}


def notes(config: HfConfig, biases: Sequence[str]) -> list[str]:
    """A line on each key that other programs read otherwise; `biases` are the file's."""
    a, family, rope = config.architecture, config.hf_class.family, gguf_rope(config.rope).note
    activation = _activation(config).get(ACTIVATION_KEY)
    spoken = {"silu": "SiLU", "gelu_tanh": "GELU"}.get(family.activation)
    usual = family.window == "must" or family.only_window
    unread = [key for key in _window_keys(config) if not usual or key != "attention.sliding_window"]
    unknown = [] if a == "llama" else [name for name in biases if name not in family.biases]
    found = {
        f"hidden_act={activation} is in the file under our own key {ACTIVATION_KEY}: llama.cpp does not read it and "
        f"runs this file with {spoken}, which gives other logits": activation,
        rope: rope,
        f"{', '.join(unread)} of {a} files: not every llama.cpp reads it; one that does not gives other logits on "
        "long texts": unread,
        f"biases of {', '.join(unknown)}: llama.cpp has no place for them in {a} files and refuses to load this one; "
        "specsparse runs it": unknown,
    }
    return [line for line, holds in found.items() if line and holds]
