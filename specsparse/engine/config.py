"""What a model is: shapes and constants read from its GGUF metadata, checked against its tensors.

`ModelConfig` is frozen and hashable, so that it can be a static argument of a jitted function.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from specsparse.engine.activation import parse_activation
from specsparse.engine.architectures import ARCHITECTURES, Architecture, LayerKind, supported_architecture
from specsparse.engine.gguf.reader import POWERINFER_MAGIC, GGUFFile, can_dequantise, show, supported_types
from specsparse.engine.rope_config import SCALINGS, RopeConfig
from specsparse.errors import UserError

MAX_CONTEXT = 1 << 24
_MAX_SIZE = 1 << 24  # no real width, head count or layer count comes near; a product of a few stays far from overflow


ACTIVATION_KEY = "specsparse.activation"
"""Our own metadata key: the activation of a file that its architecture does not tell."""

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""The weight matrices of a layer, by their GGUF names."""

_IGNORED = ("attn_rot_embd.weight", "rope_freqs.weight", "attn.rotary_emb.inv_freq")
"""Endings of tensors that old converters wrote and nothing reads (`rope_freqs.weight` without a layer is read)."""


@dataclass(frozen=True)
class ModelConfig:
    """The static facts of a model. Invariants: head counts divide, head_dim is even, every size is at least 1.

    Attributes:
        architecture: a name of `engine.architectures.ARCHITECTURES`.
        n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ff, vocab_size: L, D, H, G, d, F, V of docs/notation.md.
        context_length: positions the model may use.
        norm_eps: epsilon of every RMSNorm.
        rope: the rotary embedding.
        tied_output: whether the output matrix is the embedding.
        biases: projections (`PROJECTIONS`) with a bias, the same in every layer.
        activation: of the FFN, as `engine.activation.parse_activation` takes it.
        gated: whether the FFN has a gate; else the activation is of `ffn_up`.
        predictor_ranks: rank of each layer's predictor in a PowerInfer file, whose down matrix is stored transposed;
            () for a dense file.
        window: tokens that a layer with a window sees, the row itself among them; 0: all layers see all.
        full_every: with a window, every n-th layer sees all tokens; 0: none does.
        local_rope: the rotary embedding of the layers with a window; None: `rope`.
    """

    architecture: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    tied_output: bool = False
    biases: tuple[str, ...] = ()
    activation: str = "silu"
    gated: bool = True
    predictor_ranks: tuple[int, ...] = ()
    window: int = 0
    full_every: int = 0
    local_rope: RopeConfig | None = None

    @property
    def family(self) -> Architecture:
        """What the architecture is."""
        return ARCHITECTURES[self.architecture]

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary embeddings that layers choose from; None turns nothing."""
        if self.family.unrotated_every:
            return (self.rope, None)
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def kind(self, layer: int) -> LayerKind:
        """How the attention of layer `layer` differs."""

        def nth(n: int) -> bool:
            return n > 0 and (layer + 1) % n == 0

        windowed = self.window > 0 and not nth(self.full_every)
        table = nth(self.family.unrotated_every) or (windowed and self.local_rope is not None)
        return LayerKind(self.window if windowed else 0, int(table))

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by beside 1/sqrt(d)."""
        by_width = self.n_layers == self.family.width_scaled_layers
        return math.sqrt(self.head_dim * self.n_heads / self.d_model) if by_width else 1.0

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by."""
        return math.sqrt(self.d_model) if self.family.scaled_embedding else 1.0

    @property
    def layer_norms(self) -> dict[str, int]:
        """The norms of a layer by their GGUF names, and their widths."""
        names = {"attn_norm": self.d_model, "ffn_norm": self.d_model}
        if self.family.qk_norm:
            names |= {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        if self.family.post_norms:
            names |= {"post_attention_norm": self.d_model, "post_ffw_norm": self.d_model}
        return names

    @property
    def plain(self) -> "ModelConfig":
        """The same sizes and rotation with the layers of a plain Llama: a head's layer, whatever the target's are."""
        return replace(
            self, architecture="llama", biases=(), activation="silu", gated=True, predictor_ranks=(), window=0,
            full_every=0, local_rope=None,
        )  # fmt: skip

    def check_sums(self, what: str) -> None:
        """Refuses `what` adds neurons to the residual stream one by one where their sum is normalised before.

        Raises:
            UserError: the model has norms behind its FFN.
        """
        if self.family.post_norms:
            raise UserError(f"{what} is not supported for {self.architecture} models: they normalise what the FFN adds")

    @property
    def projections(self) -> tuple[str, ...]:
        """The matrices a layer of this model has, of `PROJECTIONS`; a PowerInfer file has `ffn_down_t` for the last."""
        names = tuple(n for n in PROJECTIONS if self.gated or n != "ffn_gate")
        return (*names[:-1], "ffn_down_t") if self.predictor_ranks else names

    def projection_shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of one of `PROJECTIONS`."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "attn_q": (q, self.d_model),
            "attn_k": (kv, self.d_model),
            "attn_v": (kv, self.d_model),
            "attn_output": (self.d_model, q),
            "ffn_gate": (self.d_ff, self.d_model),
            "ffn_up": (self.d_ff, self.d_model),
            "ffn_down": (self.d_model, self.d_ff),
            "ffn_down_t": (self.d_ff, self.d_model),
        }[name]

    @property
    def n_parameters(self) -> int:
        """Weights of all tensors; a matrix that serves as embedding and as output counts once."""
        return sum(math.prod(shape) for _, shape in self.tensor_shapes())

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (numpy order) of every tensor the model is made of, in the order they are used."""
        yield "token_embd.weight", (self.vocab_size, self.d_model)
        for layer in range(self.n_layers):
            for name, width in self.layer_norms.items():
                yield f"blk.{layer}.{name}.weight", (width,)
            for name in self.projections:
                shape = self.projection_shape(name)
                yield f"blk.{layer}.{name}.weight", shape
                if name in self.biases:
                    yield f"blk.{layer}.{name}.bias", shape[:1]
            if self.predictor_ranks:
                rank = self.predictor_ranks[layer]
                yield f"blk.{layer}.fc1.weight", (rank, self.d_model)
                yield f"blk.{layer}.fc2.weight", (self.d_ff, rank)
        yield "output_norm.weight", (self.d_model,)
        if not self.tied_output:
            yield "output.weight", (self.vocab_size, self.d_model)
        if self.rope.freq_factors:
            yield "rope_freqs.weight", (self.rope.dim // 2,)

    @staticmethod
    def from_gguf(f: GGUFFile, *, overrides: Mapping[str, object] | None = None) -> "ModelConfig":
        """The config of an open file, its tensors checked.

        Args:
            f: the file.
            overrides: `OVERRIDES` by name; None values count as not given.

        Raises:
            UserError: an unknown architecture; a key missing, of the wrong type or out of range; a tensor missing,
                unknown, of the wrong shape or type; a bad override.
        """
        config = _Reader(f).config()
        config = apply_overrides(config, overrides or {})
        _check_tensors(config, f)
        return config


class _Reader:
    """Reads `{architecture}.*` keys, each with its range."""

    def __init__(self, f: GGUFFile):
        self.f = f
        self.arch = supported_architecture(f)
        self.sparse = f.magic == POWERINFER_MAGIC

    def fail(self, key: str, value: object, wanted: str) -> UserError:
        return UserError(f"{self.f.path}: metadata key '{self.arch}.{key}' is {show(value)}, {wanted}")

    def size(self, key: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """An int in 1..most; an array stands for its value where all layers agree."""
        full = f"{self.arch}.{key}"
        array = self.f.metadata.get(full)
        if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and len(array):
            if (array != array[0]).any():
                raise UserError(f"{self.f.path}: metadata key '{full}' differs between layers, which is not supported")
            value = int(array[0])
        else:
            value = self.f.get(full, "int") if default is None else self.f.get(full, "int", default)
        if not 1 <= value <= most:
            raise self.fail(key, value, f"1 to {most} is allowed")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, most: float = 1e12) -> float:
        """A finite float in (low, most]."""
        full = f"{self.arch}.{key}"
        value = self.f.get(full, "float") if default is None else self.f.get(full, "float", default)
        if not low < value <= most:
            raise self.fail(key, value, f"a number above {low:g} and up to {most:g} is needed")
        return value

    def config(self) -> ModelConfig:
        family = ARCHITECTURES[self.arch]
        if self.sparse and family.post_norms:
            raise UserError(f"{self.f.path}: a PowerInfer file of architecture {self.arch} is not supported")
        f, d_model, n_heads = self.f, self.size("embedding_length"), self.size("attention.head_count")
        n_kv_heads = self.size("attention.head_count_kv", n_heads)
        if n_heads % n_kv_heads:
            raise self.fail("attention.head_count_kv", n_kv_heads, f"which does not divide the {n_heads} heads")
        head_dim = self._head_dim(d_model, n_heads)
        self._refuse_variants()
        context = self.size("context_length", most=MAX_CONTEXT)
        biases = tuple(
            name
            for name in PROJECTIONS
            if name in family.biases or (f"blk.0.{name}.bias" in f.tensors and not family.post_norms)
        )
        rope, window = self._rope(head_dim, context), self._window()
        n_layers = self.size("block_count", most=1 << 14)
        return ModelConfig(
            architecture=self.arch,
            n_layers=n_layers,
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            d_ff=self.size("feed_forward_length"),
            vocab_size=self._vocab_size(),
            context_length=context,
            norm_eps=self.number("attention.layer_norm_rms_epsilon", most=1.0),
            rope=rope,
            tied_output="output.weight" not in f.tensors,
            biases=biases,
            activation=self._activation(),
            gated="blk.0.ffn_gate.weight" in f.tensors or ACTIVATION_KEY not in f.metadata,
            predictor_ranks=self._ranks(n_layers) if self.sparse else (),
            window=window,
            full_every=self._full_every() if window else 0,
            local_rope=self._local_rope(rope) if window else None,
        )

    def _window(self) -> int:
        """Tokens that a layer with a window sees, 0 where none has one."""
        family, key = ARCHITECTURES[self.arch], "attention.sliding_window"
        if family.window == "never" or (family.window == "may" and not self.f.get(f"{self.arch}.{key}", "int", 0)):
            return 0
        return self.size(key, most=MAX_CONTEXT)

    def _full_every(self) -> int:
        """Of how many layers one sees all tokens."""
        key, period = "attention.sliding_window_pattern", ARCHITECTURES[self.arch].full_every
        full = f"{self.arch}.{key}"
        if not isinstance(self.f.metadata.get(full), np.ndarray):
            return self.size(key, period, most=1 << 14) if period or full in self.f.metadata else 0
        given = self.f.metadata[full].astype(bool).tolist()  # of each layer, whether it has a window
        if given != [not period or (i + 1) % period != 0 for i in range(len(given))]:
            wanted = f"all layers but every {period}th" if period else "all layers"
            raise UserError(f"{self.f.path}: metadata key '{full}': only a window on {wanted} is supported")
        return period

    def _local_rope(self, rope: RopeConfig) -> RopeConfig | None:
        """The rotary embedding of layers with a window: a base of their own, and no scaling."""
        base = ARCHITECTURES[self.arch].local_rope_base
        if base is None:
            return None
        return RopeConfig(self.number("rope.freq_base_swa", base, low=1.0), rope.dim, rope.pairing)

    def _activation(self) -> str:
        family = ARCHITECTURES[self.arch]
        name = self.f.get(ACTIVATION_KEY, "str", family.sparse_activation if self.sparse else family.activation)
        parse_activation(name, where=f"{self.f.path}: metadata key '{ACTIVATION_KEY}'")
        return name

    def _ranks(self, n_layers: int) -> tuple[int, ...]:
        """Rows of fc1, layer by layer; the rest of the shapes is checked with all tensors."""
        ranks = []
        for layer in range(n_layers):
            fc1 = self.f.tensors.get(f"blk.{layer}.fc1.weight")
            if fc1 is None or len(fc1.shape) != 2:
                raise UserError(
                    f"{self.f.path}: layer {layer} has no predictor (tensor 'blk.{layer}.fc1.weight' "
                    f"[rank, {self.size('embedding_length')}] is missing); make the file again with "
                    "`specsparse convert powerinfer`"
                )
            ranks.append(fc1.shape[0])
        return tuple(ranks)

    def _head_dim(self, d_model: int, n_heads: int) -> int:
        if f"{self.arch}.attention.key_length" not in self.f.metadata and d_model % n_heads:
            raise self.fail("attention.head_count", n_heads, f"which does not divide the width {d_model}")
        head_dim = self.size("attention.key_length", max(d_model // n_heads, 1))
        value_dim = self.size("attention.value_length", head_dim)
        if value_dim != head_dim:
            raise self.fail("attention.value_length", value_dim, f"it must equal the key length {head_dim}")
        if head_dim % 2:
            raise self.fail("attention.key_length", head_dim, "RoPE needs an even head dimension")
        return head_dim

    def _refuse_variants(self) -> None:
        """Features that change the result and are not built: better refused than ignored."""
        if experts := self.f.get(f"{self.arch}.expert_count", "int", 0):
            raise self.fail("expert_count", experts, "mixture-of-experts models are not supported")
        if not self.f.get(f"{self.arch}.attention.causal", "bool", True):
            raise self.fail("attention.causal", False, "only causal models are supported")
        for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
            if (value := self.f.get(f"{self.arch}.{key}", "float", 1.0)) != 1.0:
                raise self.fail(key, value, "only 1 is supported")
        if multiplier := self.f.get(f"{self.arch}.rope.scaling.yarn_log_multiplier", "float", 0.0):
            raise self.fail("rope.scaling.yarn_log_multiplier", multiplier, "only 0 is supported")

    def _vocab_size(self) -> int:
        """The tokenizer's token count; the key where there is no tokenizer; else the embedding's rows."""
        tokens = self.f.get_strings("tokenizer.ggml.tokens")
        if tokens:
            return len(tokens)
        embedding = self.f.tensors.get("token_embd.weight")
        return self.size("vocab_size", embedding.shape[0] if embedding else 1)

    def _rope(self, head_dim: int, context: int) -> RopeConfig:
        dim = self.size("rope.dimension_count", head_dim)
        if dim != head_dim:
            raise self.fail("rope.dimension_count", dim, f"partial RoPE (head dimension {head_dim}) is not supported")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0), most=1e6)
        # As in llama.cpp: a factor without a type is linear, and type "none" switches a factor off.
        scaling = self.f.get(f"{self.arch}.rope.scaling.type", "str", "linear" if factor != 1.0 else "none")
        if scaling not in SCALINGS:
            raise self.fail("rope.scaling.type", scaling, f"supported are {', '.join(SCALINGS)}")
        rope = RopeConfig(
            base=self.number("rope.freq_base", 10000.0, low=1.0),
            dim=dim,
            pairing=ARCHITECTURES[self.arch].pairing,
            scaling=scaling,
            factor=1.0 if scaling == "none" else factor,
            original_context=self.size("rope.scaling.original_context_length", context, most=MAX_CONTEXT),
            attn_factor=self.number("rope.scaling.attn_factor", 1.0, most=1e3),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0, most=1e6),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0, most=1e6),
            freq_factors="rope_freqs.weight" in self.f.tensors,
        )
        if scaling == "yarn" and factor < 1.0:
            raise self.fail("rope.scaling.factor", factor, "YaRN needs at least 1")
        return rope


OVERRIDES = ("rope_base", "rope_scale", "rope_scaling", "context_length", "activation")
"""Keywords of `specsparse.load` that change the config."""


def apply_overrides(config: ModelConfig, overrides: Mapping[str, object]) -> ModelConfig:
    """`config` with the user's wishes.

    Args:
        config: as the file has it.
        overrides: rope_base (theta, above 1), rope_scale (the factor, above 0: 2 doubles the usable context),
            rope_scaling ("none", "linear", "yarn"), context_length (tokens), activation ("relu" for a dense
            ReluLLaMA, whose file does not say it). A scale without a scaling is linear unless the file names one.

    Raises:
        UserError: an unknown name, or a value of the wrong type or out of range.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    if unknown := [name for name in given if name not in OVERRIDES]:
        raise UserError(f"unknown option {show(unknown[0])}; the model's options are {', '.join(OVERRIDES)}")
    rope = config.rope
    if "rope_base" in given:
        rope = replace(rope, base=_number("rope_base", given["rope_base"], low=1.0))
    scaling = given.get("rope_scaling", rope.scaling)
    if scaling not in SCALINGS:
        raise UserError(f"rope_scaling is {show(scaling)}; it must be one of {', '.join(SCALINGS)}")
    factor = rope.factor
    if "rope_scale" in given:
        factor = _number("rope_scale", given["rope_scale"], low=0.0)
        if scaling == "none" and "rope_scaling" in given:
            raise UserError("rope_scale does nothing with rope_scaling='none': give 'linear' or 'yarn'")
        scaling = "linear" if scaling == "none" else scaling
    elif given.get("rope_scaling", "none") != "none" and rope.scaling == "none":
        raise UserError(f"rope_scaling={scaling!r} needs rope_scale: this model has no factor of its own")
    if scaling == "yarn" and factor < 1.0:
        raise UserError(f"rope_scale is {factor:g}; YaRN needs at least 1")
    rope = replace(rope, scaling=scaling, factor=1.0 if scaling == "none" else factor)
    context = given.get("context_length", config.context_length)
    if isinstance(context, bool) or not isinstance(context, (int, np.integer)) or not 1 <= context <= MAX_CONTEXT:
        raise UserError(f"context_length is {show(context)}; it must be a whole number from 1 to {MAX_CONTEXT}")
    activation = given.get("activation", config.activation)
    parse_activation(activation, where="activation")
    return replace(config, rope=rope, context_length=int(context), activation=activation)


def _number(name: str, value: object, low: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise UserError(f"{name} is {show(value)}; it must be a number")
    if not math.isfinite(value) or not low < value <= 1e12:
        raise UserError(f"{name} is {value:g}; it must be above {low:g} and up to 1e12")
    return float(value)


def _check_tensors(config: ModelConfig, f: GGUFFile) -> None:
    """Every tensor of the model is there with its shape and a usable type, and no other one is."""
    wanted = set()
    for name, shape in config.tensor_shapes():  # stops at the first that is missing, however many layers were claimed
        tensor = f.tensors.get(name)
        if tensor is None:
            raise UserError(f"{f.path}: tensor '{name}' of shape {shape} is missing")
        if tensor.shape != shape:
            raise UserError(f"{f.path}: tensor '{name}' has shape {tensor.shape}, its metadata asks for {shape}")
        if not can_dequantise(tensor.type):
            usable = ", ".join(kind.name for kind in supported_types())
            raise UserError(f"{f.path}: tensor '{name}' has type {tensor.type.name}; supported are {usable}")
        wanted.add(name)
    for name in f.tensors:
        if name not in wanted and not name.endswith(_IGNORED):
            raise UserError(f"{f.path}: tensor {show(name)} is not one that a {config.architecture} model here has")
