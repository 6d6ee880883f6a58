"""The static facts of a model: shapes and constants read from its GGUF metadata, checked against its tensors.

`ModelConfig` is frozen and hashable, so that it can be a static argument of a jitted function.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from specsparse.engine.architectures import (
    ARCHITECTURES,
    Architecture,
    Gating,
    LayerKind,
    Routing,
    supported_architecture,
)
from specsparse.engine.gguf.reader import POWERINFER_MAGIC, GGUFFile, Kind, can_dequantise, show, supported_types
from specsparse.engine.rope import SCALINGS, RopeConfig
from specsparse.errors import UserError, refuse
from specsparse.support.options import Range, options_of, read

MAX_CONTEXT = 1 << 24
_MAX_SIZE = 1 << 24  # no real width, head count or layer count comes near; a product of a few stays far from overflow

ACTIVATION_KEY = "specsparse.activation"
"""Our own metadata key: the activation of a file, if its architecture does not tell it."""

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""The weight matrices of a dense layer, by their GGUF names."""
ROUTER = "ffn_gate_inp"
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""The matrices of all experts of a layer, stacked."""

_UNSUPPORTED_EXPERTS = {  # parts of names of tensors, and what they are
    "_shexp": "shared experts",
    "exp_probs_b": "biases of the choice of experts",
    "ffn_gate_up_exps": "gate and up of experts in one tensor",
    "_exps.scale": "scales of experts",
}

_IGNORED = ("attn_rot_embd.weight", "rope_freqs.weight", "attn.rotary_emb.inv_freq")
"""Endings of tensors that old converters wrote and nothing reads (`rope_freqs.weight` without a layer is read)."""

Act = str | tuple[str, float]
"""An activation as the kernels name it: "silu", "gelu_tanh", "relu", "relu2", ("fatrelu", t)."""
GATINGS: tuple[Gating | None, ...] = (None, "softmax", "sigmoid", "chosen")
"""By their numbers in GGUF files."""
_ACTIVATIONS = ("silu", "gelu_tanh", "relu", "drelu", "relu2", "fatrelu(t)")


def woken(share: float, rows: float, overlap: float | None = None, batch: int = 1) -> float:
    """The part of a layer's experts that `rows` rows in each of `batch` texts wake, if a row wakes `share` of them.

    Rows choose by chance, or each has the part `overlap` of its experts from the row before it, in a tree from its
    parent, and the others by chance: an expert that slept there wakes with the same chance at every row, so the number
    of rows decides and not the shape of the tree. Texts have experts in common by chance.
    """
    if share >= 1:
        return 1.0
    wakes = share if overlap is None else min(share * (1 - overlap) / (1 - share), 1.0)
    return 1 - ((1 - share) * (1 - wakes) ** (rows - 1)) ** batch


def parse_activation(name: object, *, where: str = "activation") -> tuple[Act, Act | None]:
    """(activation of the gate, activation of up or None) of a name.

    gelu_tanh is GELU by its tanh formula (Hendrycks and Gimpel 2016, arXiv:1606.08415); relu is ReGLU; drelu is relu of
    gate and up (TurboSparse, arXiv:2406.05955); relu2 is relu squared; fatrelu(t) is x if x > t, else 0 (ProSparse,
    arXiv:2402.13516). UserError: another name, or a t that is not a finite number of at least 0; `where` begins the
    line."""
    if name in ("silu", "gelu_tanh", "relu", "relu2"):
        return name, None
    if name == "drelu":
        return "relu", "relu"
    found = re.fullmatch(r"fatrelu\(\s*([^)]*?)\s*\)", name) if isinstance(name, str) else None
    try:
        threshold = float(found[1]) if found else math.nan
    except ValueError:
        threshold = math.nan
    if 0 <= threshold < math.inf:
        return ("fatrelu", threshold), None
    raise UserError(f"{where} is {name!r:.60}; it must be one of {', '.join(_ACTIVATIONS)}, t a number of at least 0")


@dataclass(frozen=True)
class ModelConfig:
    """The static facts of a model. Invariants: head counts divide, head_dim is even, every size is at least 1."""

    architecture: str  # a name of `engine.architectures.ARCHITECTURES`
    # n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ff, vocab_size: L, D, H, G, d, F, V of docs/notation.md; with
    # experts, F is the width of one
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    context_length: int  # positions the model may use
    norm_eps: float  # epsilon of every RMSNorm
    rope: RopeConfig
    tied_output: bool = False  # whether the output matrix is the embedding
    biases: tuple[str, ...] = ()  # projections (`projections`) with a bias, the same in every layer
    activation: str = "silu"  # of the FFN, as `parse_activation` takes it
    gated: bool = True  # whether the FFN has a gate; else the activation is of `ffn_up`
    # rank of each layer's predictor in a PowerInfer file, whose down matrix is stored transposed; () for a dense file
    predictor_ranks: tuple[int, ...] = ()
    window: int = 0  # tokens that a layer with a window sees, the row itself among them; 0: all layers see all
    full_every: int = 0  # with a window, every n-th layer sees all tokens; 0: no layer does
    local_rope: RopeConfig | None = None  # the rotary embedding of the layers with a window; None: `rope`
    # embedding_multiplier, logit_multiplier: factors of embeddings and logits
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    # n_experts, n_chosen: E and k, experts of a layer and of a row; 0: the FFN is dense
    n_experts: int = 0
    n_chosen: int = 0
    gating: Gating = "softmax"  # of the experts, as `Routing` has it

    @property
    def family(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary embeddings that layers choose from; None leaves positions out."""
        if self._unrotated_every:
            return (self.rope, None)
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def _unrotated_every(self) -> int:
        return self.family.unrotated_every if self.window or not self.family.full_every else 0

    def kind(self, layer: int) -> LayerKind:
        windowed = self.window > 0 and not self.family.is_nth(layer, self.full_every)
        table = self.family.is_nth(layer, self._unrotated_every) or (windowed and self.local_rope is not None)
        return LayerKind(self.window if windowed else 0, int(table))

    def endless_kv(self, layers: Iterable[int] | None = None) -> int:
        """Keys, as numbers, that a token leaves in those of the layers (None: all) that have no window."""
        chosen = range(self.n_layers) if layers is None else layers
        return sum(self.n_kv_heads * self.head_dim for layer in chosen if not self.kind(layer).window)

    @property
    def query_scale(self) -> float:
        """The factor that queries have beside 1/sqrt(d)."""
        by_width = self.n_layers == self.family.width_scaled_layers
        return math.sqrt(self.head_dim * self.n_heads / self.d_model) if by_width else 1.0

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.d_model) if self.family.scaled_embedding else self.embedding_multiplier

    @property
    def layer_norms(self) -> dict[str, int]:
        """The norms of a layer by their GGUF names, and their widths."""
        names = {"attn_norm": self.d_model, self.family.ffn_norm: self.d_model} if self.family.pre_norms else {}
        if self.family.qk_norm:
            widths = (self.n_heads, self.n_kv_heads) if self.family.qk_norm == "whole" else (1, 1)
            names |= {f"attn_{n}_norm": heads * self.head_dim for n, heads in zip("qk", widths)}
        if self.family.post_norms:
            names |= {"post_attention_norm": self.d_model, "post_ffw_norm": self.d_model}
        return names

    @property
    def plain(self) -> "ModelConfig":
        """The same sizes and rotation with the layers of a plain Llama, as draft heads have them."""
        return replace(
            self, architecture="llama", biases=(), activation="silu", gated=True, predictor_ranks=(), window=0,
            full_every=0, local_rope=None, embedding_multiplier=1.0, logit_multiplier=1.0, n_experts=0, n_chosen=0,
        )  # fmt: skip

    def check_sums(self, what: str) -> None:
        """Raises UserError if an FFN is not a sum of neurons: `what` adds them to the residual one by one."""
        if self.family.post_norms or self.n_experts:
            why = "their FFN is experts" if self.n_experts else "they normalise FFN outputs"
            raise UserError(f"{what} is not supported for {self.architecture} models: {why}")

    @property
    def projections(self) -> tuple[str, ...]:
        """The matrices of a layer: of `PROJECTIONS`, or attention's, `ROUTER` and `EXPERTS`; a PowerInfer file has
        `ffn_down_t` for the last."""
        if self.n_experts:
            return (*PROJECTIONS[:4], ROUTER, *EXPERTS)
        if self.family.fused:
            return ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        names = tuple(n for n in PROJECTIONS if self.gated or n != "ffn_gate")
        return (*names[:-1], "ffn_down_t") if self.predictor_ranks else names

    def projection_shape(self, name: str) -> tuple[int, ...]:
        """Rows (outputs) and columns (inputs) of one of `projections`, E before them for `EXPERTS`."""
        if parts := self.family.fused.get(name):
            return sum(self.part_shape(part)[0] for part in parts), self.d_model
        if name in EXPERTS:
            return (self.n_experts, *self.part_shape(name.removesuffix("_exps")))
        return self.part_shape(name)

    def part_shape(self, name: str) -> tuple[int, int]:
        """The same of one matrix, whether it is fused with others in the file or not."""
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
            ROUTER: (self.n_experts, self.d_model),
        }[name]

    def share_read(self, name: str) -> float:
        """The part of a tensor that one row reads: of the experts those that it chooses."""
        return self.n_chosen / self.n_experts if self.n_experts and "_exps." in name else 1.0

    @property
    def n_parameters(self) -> int:
        """Weights of all tensors; a matrix that serves as embedding and as output counts once."""
        return sum(math.prod(shape) for _, shape in self.tensor_shapes())

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (numpy order) of every tensor, in the order they are used."""
        yield "token_embd.weight", (self.vocab_size, self.d_model)
        for layer in range(self.n_layers):
            for name, width in self.layer_norms.items():
                yield f"blk.{layer}.{name}.weight", (width,)
            for name in self.projections:
                shape = self.projection_shape(name)
                yield f"blk.{layer}.{name}.weight", shape
                if name in self.biases:
                    yield f"blk.{layer}.{name}.bias", shape[:-1]
            if self.family.sinks:
                yield f"blk.{layer}.attn_sinks.weight", (self.n_heads,)
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
        """The config of an open file with the fields of `Overrides`, its tensors checked. UserError: an unknown
        architecture; a key missing, of the wrong type or out of range; a tensor missing, unknown, of the wrong shape or
        type; a bad override."""
        config = _with_overrides(_Reader(f).config(), overrides or {})
        _check_tensors(config, f)
        return config


class _Reader:
    """Reads `{architecture}.*` keys, each with its range."""

    def __init__(self, f: GGUFFile):
        self.f, self.arch = f, supported_architecture(f)
        self.family, self.sparse = ARCHITECTURES[self.arch], f.magic == POWERINFER_MAGIC

    def need(self, key: str, value: Any, holds: bool, wanted: str) -> Any:
        """The value, which must be as `wanted`."""
        if not holds:
            raise UserError(f"{self.f.path}: metadata key '{self.arch}.{key}' is {show(value)}, {wanted}")
        return value

    def get(self, key: str, kind: Kind, default: Any = None) -> Any:
        """The value of a key, which is required unless a default is given."""
        return self.f.get(f"{self.arch}.{key}", kind, *(() if default is None else (default,)))

    def size(self, key: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """An int in 1..most; an array stands for its value if all layers agree."""
        array = self.f.metadata.get(f"{self.arch}.{key}")
        if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and len(array) > 0:
            value, differs = int(array[0]), "and a value that differs between layers is not supported"
            self.need(key, array.tolist(), bool((array == value).all()), differs)
        else:
            value = self.get(key, "int", default)
        return self.need(key, value, 1 <= value <= most, f"1 to {most} is allowed")

    def number(self, key: str, default: float | None = None, low: float = 0.0, most: float = 1e12) -> float:
        """A finite float above `low` and up to `most`."""
        value = self.get(key, "float", default)
        return self.need(key, value, low < value <= most, f"a number above {low:g} and up to {most:g} is needed")

    def config(self) -> ModelConfig:
        f, family = self.f, self.family
        if self.sparse and (family.post_norms or family.routing):
            raise UserError(f"{f.path}: a PowerInfer file of architecture {self.arch} is not supported")
        # Features that change the result and are not built: better refused than ignored.
        for key, kind, only in (
            ("attention.clamp_kqv", "float", 0),
            ("attention.causal", "bool", True),
            ("rope.scaling.yarn_ext_factor", "float", 1),
            ("rope.scaling.yarn_attn_factor", "float", 1),
            ("rope.scaling.yarn_log_multiplier", "float", 0),
        ):
            value = self.get(key, kind, only)
            self.need(key, value, value == only, f"only {only} is supported")
        d_model, n_heads = self.size("embedding_length"), self.size("attention.head_count")
        n_kv_heads = self.size("attention.head_count_kv", n_heads)
        wanted = f"which does not divide the {n_heads} heads"
        self.need("attention.head_count_kv", n_kv_heads, n_heads % n_kv_heads == 0, wanted)
        fits = f"{self.arch}.attention.key_length" in f.metadata or d_model % n_heads == 0
        self.need("attention.head_count", n_heads, fits, f"which does not divide the width {d_model}")
        head_dim = self.size("attention.key_length", max(d_model // n_heads, 1))
        self.need("attention.key_length", head_dim, head_dim % 2 == 0, "RoPE needs an even head dimension")
        for key in ("attention.value_length", "rope.dimension_count"):
            value = self.size(key, head_dim)
            self.need(key, value, value == head_dim, f"the head dimension {head_dim} is needed")
        n_layers, context = self.size("block_count", most=1 << 14), self.size("context_length", most=MAX_CONTEXT)
        built_in = bool(family.routing or family.fused)  # a gate of another name
        activation = f.get(ACTIVATION_KEY, "str", family.sparse_activation if self.sparse else family.activation)
        if family.routing:
            named = f"{f.path}: metadata key '{ACTIVATION_KEY}' is {activation!r:.60}; {self.arch} has"
            refuse({f"{named} {family.activation}": activation != family.activation})
        else:
            parse_activation(activation, where=f"{f.path}: metadata key '{ACTIVATION_KEY}'")
        tokens, embedding = f.get("tokenizer.ggml.tokens", "strings", None), f.tensors.get("token_embd.weight")
        fc1 = [f.tensors.get(f"blk.{i}.fc1.weight") for i in range(n_layers if self.sparse else 0)]
        rope, eps, scaled = self.multipliers(head_dim, self.rope(head_dim, context))
        ranks = tuple(t.shape[0] if t else 0 for t in fc1)
        return ModelConfig(
            architecture=self.arch,
            n_layers=n_layers,
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            d_ff=self.expert_width() if family.routing else self.size("feed_forward_length"),
            vocab_size=len(tokens) if tokens else self.size("vocab_size", embedding.shape[0] if embedding else 1),
            context_length=context,
            norm_eps=eps,
            rope=rope,
            tied_output="output.weight" not in f.tensors,
            biases=tuple(
                name
                for name in (*PROJECTIONS, ROUTER, *EXPERTS)
                if name in family.biases or (f"blk.0.{name}.bias" in f.tensors and not family.post_norms)
            ),
            activation=activation,
            gated="blk.0.ffn_gate.weight" in f.tensors or ACTIVATION_KEY not in f.metadata or built_in,
            predictor_ranks=ranks,
            **self.windows(rope),
            **scaled,
            **self.experts(family.routing),
        )

    def multipliers(self, head_dim: int, rope: RopeConfig) -> tuple[RopeConfig, float, dict[str, Any]]:
        """The rotation, the epsilon of the norms, and `embedding_multiplier` and `logit_multiplier`.

        Granite's factors become changes of what a Llama has anyway. Rotary tables scale queries and keys, each by the
        root of the factor of scores. The residual stream is kept divided by the factor r of what layers add, which an
        RMS norm does not see if its epsilon is divided by r^2.
        """
        eps = self.number("attention.layer_norm_rms_epsilon", most=1.0)
        if not self.family.multipliers:
            return rope, eps, {}
        usual = head_dim**-0.5
        scores = self.number("attention.scale", usual, most=1e3) / usual
        added = self.number("residual_scale", 1.0, most=1e3)
        scaled = {
            "embedding_multiplier": self.number("embedding_scale", 1.0, most=1e6) / added,
            "logit_multiplier": 1 / self.number("logit_scale", 1.0, most=1e6),
        }
        return replace(rope, attn_factor=rope.attn_factor * math.sqrt(scores)), eps / added**2, scaled

    def expert_width(self) -> int:
        """A file without the key has its experts' own width, or k times it, as `feed_forward_length`."""
        gate = self.f.tensors.get("blk.0.ffn_gate_exps.weight")
        key = "expert_feed_forward_length"
        width = self.size(key, gate.shape[1] if gate and len(gate.shape) == 3 else None)
        return self.need(key, width, width % 16 == 0, "a multiple of 16 is needed")

    def experts(self, routing: Routing | None) -> dict[str, Any]:
        """`n_experts`, `n_chosen` and `gating` of a config; empty if the FFN is dense."""
        if routing is None:
            count = self.get("expert_count", "int", 0)
            self.need("expert_count", count, count == 0, "only 0 is supported")
            return {}
        for ending, what in _UNSUPPORTED_EXPERTS.items():
            if name := next((name for name in self.f.tensors if ending in name), None):
                raise UserError(f"{self.f.path}: {what} are not supported (tensor {show(name)})")
        width = self.size("embedding_length")
        self.need("embedding_length", width, width % 16 == 0, "a multiple of 16 is needed")
        count, scale = self.size("expert_count"), self.get("expert_weights_scale", "float", 1.0)
        self.need("expert_weights_scale", scale, scale in (0.0, 1.0), "only 1 is supported")
        normalised = self.get("expert_weights_norm", "bool", routing.normalised)
        self.need("expert_weights_norm", normalised, normalised == routing.normalised, f"{self.arch} has the other")
        key, gating = "expert_gating_func", routing.gating
        if gating is None or f"{self.arch}.{key}" in self.f.metadata:
            number = self.get(key, "int", GATINGS.index(gating or "softmax"))
            known = range(1, len(GATINGS)) if gating is None else [GATINGS.index(gating)]
            self.need(key, number, number in known, f"supported are {', '.join(map(str, known))}")
            gating = GATINGS[number]
        return {"n_experts": count, "n_chosen": self.size("expert_used_count", most=count), "gating": gating}

    def windows(self, rope: RopeConfig) -> dict[str, Any]:
        """`window`, `full_every` and `local_rope` of a config; empty if no layer has a window."""
        family, key = self.family, "attention.sliding_window"
        if family.window == "never" or (family.window == "may" and not self.get(key, "int", 0)):
            return {}
        window = self.size(key, most=MAX_CONTEXT)
        self.need(key, window, window == (family.only_window or window), f"only {family.only_window} is supported")
        key, period = f"{key}_pattern", family.full_every
        pattern = self.f.metadata.get(f"{self.arch}.{key}")
        if isinstance(pattern, np.ndarray):  # of each layer, whether it has a window
            given = pattern.astype(bool).tolist()
            wanted = [not family.is_nth(i, period) for i in range(len(given))]
            which = f"all layers but every {period}th" if period else "all layers"
            self.need(key, given, given == wanted, f"only a window on {which} is supported")
        elif pattern is not None or period:
            period = self.size(key, period or None, most=1 << 14)
        local = None
        if family.local_rope_base is not None:  # a base of their own, and no scaling
            base = self.number("rope.freq_base_swa", family.local_rope_base, low=1.0)
            local = RopeConfig(base, rope.dim, rope.pairing)
        return {"window": window, "full_every": period, "local_rope": local}

    def rope(self, head_dim: int, context: int) -> RopeConfig:
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0), most=1e6)
        # As in llama.cpp: a factor without a type is linear, and type "none" switches a factor off.
        scaling = self.get("rope.scaling.type", "str", "linear" if factor != 1.0 else "none")
        self.need("rope.scaling.type", scaling, scaling in SCALINGS, f"supported are {', '.join(SCALINGS)}")
        self.need("rope.scaling.factor", factor, scaling != "yarn" or factor >= 1.0, "YaRN needs at least 1")
        return RopeConfig(
            base=self.number("rope.freq_base", 10000.0, low=1.0),
            dim=head_dim,
            pairing=self.family.pairing,
            scaling=scaling,
            factor=1.0 if scaling == "none" else factor,
            original_context=self.size("rope.scaling.original_context_length", context, most=MAX_CONTEXT),
            attn_factor=self.number("rope.scaling.attn_factor", 1.0, most=1e3),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0, most=1e6),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0, most=1e6),
            freq_factors="rope_freqs.weight" in self.f.tensors,
            rounds_yarn=self.family.rounds_yarn,
        )


@dataclass(frozen=True)
class Overrides:
    """Options of `specsparse.load` that replace metadata of the file; None keeps it."""

    rope_base: Annotated[float | None, Range(1, 1e12, above=True)] = None  # theta
    # the factor: 2 doubles the usable context. Without a scaling it is linear unless the file names one
    rope_scale: Annotated[float | None, Range(0, 1e12, above=True)] = None
    rope_scaling: Literal["none", "linear", "yarn"] | None = None  # how the context is stretched
    context_length: Annotated[int | None, Range(1, MAX_CONTEXT)] = None  # tokens
    activation: str | None = None  # of the FFN, such as "relu" for a dense ReluLLaMA, whose file does not say it
    # whose ramp YaRN has: the model's own ("reference"), or llama.cpp's, which rounds where it begins and ends. They
    # differ in gpt-oss
    yarn: Literal["reference", "llama.cpp"] | None = None


OVERRIDES = tuple(options_of(Overrides))


def _with_overrides(config: ModelConfig, overrides: Mapping[str, object]) -> ModelConfig:
    given, rope = read(Overrides, overrides, group=""), config.rope
    scaling, factor = given.rope_scaling or rope.scaling, given.rope_scale or rope.factor
    unscaled = given.rope_scale is None and rope.scaling == "none"
    if given.rope_scale is not None and given.rope_scaling is None and scaling == "none":
        scaling = "linear"
    refuse({
        "rope_scale does nothing with rope_scaling='none': give 'linear' or 'yarn'":
            given.rope_scale is not None and scaling == "none",
        f"rope_scaling={scaling!r} needs rope_scale: this model has no factor of its own":
            unscaled and scaling != "none",
        f"rope_scale is {factor:g}; YaRN needs at least 1": scaling == "yarn" and factor < 1.0,
    })  # fmt: skip
    factor = 1.0 if scaling == "none" else factor
    if given.activation is not None:
        refuse({f"activation={given.activation} is for dense models; this one has experts": config.n_experts > 0})
        parse_activation(given.activation)
    return replace(
        config,
        rope=replace(
            rope, base=given.rope_base or rope.base, scaling=scaling, factor=factor,
            rounds_yarn=rope.rounds_yarn or given.yarn == "llama.cpp",
        ),
        context_length=given.context_length or config.context_length,
        activation=given.activation or config.activation,
    )


def _check_tensors(config: ModelConfig, f: GGUFFile) -> None:
    """Every tensor of the model must be there with its shape and a usable type, and no other one."""
    wanted = set()
    for name, shape in config.tensor_shapes():  # stops at the first that is missing, however many layers were claimed
        tensor, problem = f.tensors.get(name), ""
        if tensor is None:
            problem = f"of shape {shape} is missing"
        elif tensor.shape != shape:
            problem = f"has shape {tensor.shape}, its metadata asks for {shape}"
        elif not can_dequantise(tensor.type):
            problem = f"has type {tensor.type.name}; supported are {', '.join(k.name for k in supported_types())}"
        if problem:
            raise UserError(f"{f.path}: tensor '{name}' {problem}")
        wanted.add(name)
    for name in f.tensors:
        if name not in wanted and not name.endswith(_IGNORED):
            raise UserError(f"{f.path}: tensor {show(name)} is not one that a {config.architecture} model here has")
