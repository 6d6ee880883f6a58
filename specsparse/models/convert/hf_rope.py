"""The rotary embedding of a transformers config -> GGUF keys, and the frequency factors that say what no key says."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from specsparse.engine.config import MAX_CONTEXT
from specsparse.engine.rope import angles
from specsparse.engine.rope_config import RopeConfig
from specsparse.errors import UserError
from specsparse.support.json_files import Json

KINDS = ("default", "linear", "llama3", "yarn")
_READ = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "partial_rotary_factor", "finetuned",
}  # fmt: skip
"""Keys of the scaling that transformers reads for one kind or another, and one that changes nothing."""
_ATTENTION = "rope.scaling.attn_factor"
_LEAST, _MOST = 1e-6, 1e9  # no real number of a scaling comes near


@dataclass(frozen=True)
class HfRope:
    """A rotary embedding as transformers computes it.

    Attributes:
        where: the config file, for messages.
        architecture: of the GGUF file. llama.cpp reads frequency factors in "llama" files only, and in no file of
            these architectures the bounds of YaRN's ramp (src/llama-model.cpp of July 2026).
        values: of rope_parameters or rope_scaling.
        base: theta.
        dim: elements of a head.
        context: max_position_embeddings.
        pretrained: original_max_position_embeddings outside the scaling, which comes first; None without one.
    """

    where: Path
    architecture: str
    values: Json
    base: float
    dim: int
    context: int
    pretrained: int | None = None

    @property
    def kind(self) -> str:
        """One of KINDS.

        Raises:
            UserError: another kind, or a key that no kind has.
        """
        kind = self.values.get("rope_type", self.values.get("type", "default"))
        if kind not in KINDS:
            raise UserError(f"{self.where}: rope scaling {kind!r} is not supported; there are {', '.join(KINDS)}")
        unknown = sorted(key for key, value in self.values.items() if key not in _READ and value is not None)
        if unknown:
            raise UserError(f"{self.where}: rope scaling {kind!r} with {unknown[0]} is not supported")
        if self.number("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(f"{self.where}: partial_rotary_factor is not supported: every element of a head must turn")
        return kind

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number of the scaling; null counts as missing.

        Raises:
            UserError: it is missing and has no default, is none, or is one that no angle can be made of.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
            raise UserError(
                f"{self.where}: rope scaling has {key}={value!r:.40}, a positive number is needed, {_LEAST:g} to "
                f"{_MOST:g}"
            )
        return float(value)

    @property
    def original(self) -> int:
        """Trained positions; UserError where there are none, or more than any model has."""
        key = "original_max_position_embeddings"
        positions = self.pretrained or int(self.number(key, float(self.context)))
        if not 1 <= positions <= MAX_CONTEXT:
            raise UserError(f"{self.where}: {key} is {positions!r:.40}, 1 to {MAX_CONTEXT} is allowed")
        return positions

    @property
    def plain(self) -> np.ndarray:
        """Radians per position without a scaling, float64[dim / 2]."""
        return self.base ** (-2.0 * np.arange(self.dim // 2) / self.dim)


@dataclass(frozen=True)
class Said:
    """What a GGUF file says of a rotary embedding.

    Attributes:
        keys: without the architecture before them.
        factors: `rope_freqs.weight`, what each pair's angle is divided by, float32[dim / 2]; None for none.
        note: what another program does not read of it, in one line; None where all read the same.
    """

    keys: Json = field(default_factory=dict)
    factors: np.ndarray | None = None
    note: str | None = None


def said(rope: HfRope) -> Said:
    """Keys and factors for a rotary embedding.

    Raises:
        UserError: a number is missing or out of range, or GGUF cannot say it.
    """
    match rope.kind:
        case "linear":
            return Said({"rope.scaling.type": "linear", "rope.scaling.factor": rope.number("factor")})
        case "llama3":
            return Said(factors=llama3_factors(rope))
        case "yarn":
            return _yarn(rope)
    return Said()


def llama3_factors(rope: HfRope) -> np.ndarray:
    """What Llama 3.1 divides the angle of each pair by, float32[dim / 2].

    Pairs that turn more than high_freq_factor times over the original context keep their angle, those that turn less
    than low_freq_factor times are divided by the factor, and those between mix both (Llama 3 report, arXiv:2407.21783;
    `rope_freqs.weight` of llama.cpp).

    Raises:
        UserError: one of the numbers is missing or not positive, or low_freq_factor is not the smaller bound.
    """
    factor, low, high = (rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if rope.pretrained is None:
        rope.number("original_max_position_embeddings")
    if low >= high:
        raise UserError(f"{rope.where}: rope scaling has low_freq_factor={low:g} and high_freq_factor={high:g}: the "
                        "first must be the smaller one")  # fmt: skip
    smooth = np.clip((rope.original * rope.plain / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def yarn_angles(rope: HfRope, factor: float) -> np.ndarray:
    """Radians per position of each pair by YaRN (arXiv:2309.00071, eq. 13 and 14) as transformers has it,
    float64[dim / 2].

    Raises:
        UserError: beta_fast, beta_slow or truncate is not what it must be.
    """
    truncate = rope.values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"{rope.where}: rope scaling has truncate={truncate!r:.40}, true or false is needed")
    turns = np.array([rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)])
    low, high = rope.dim * np.log(rope.original / (turns * 2 * np.pi)) / (2 * np.log(rope.base))
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, rope.dim - 1.0)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return rope.plain / factor * ramp + rope.plain * (1.0 - ramp)


def yarn_magnitude(rope: HfRope, factor: float) -> float:
    """What multiplies cos and sin: attention_factor, else the ratio of the two mscales, else 1 + 0.1 ln(factor)."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return grown(rope.number("mscale")) / grown(rope.number("mscale_all_dim"))
    return grown(1.0)


def _yarn(rope: HfRope) -> Said:
    """YaRN's keys where their readers compute the same angles; else the same angles as frequency factors.

    llama.cpp takes `attn_factor` beside its own 1 + 0.1 ln(factor), rounds the ramp's bounds, and has 32 and 1 turns
    for them whatever a file of these architectures says.
    """
    factor = rope.number("factor", rope.context / rope.original)
    if factor < 1.0:
        raise UserError(f"{rope.where}: rope scaling has factor={factor:g}, YaRN needs at least 1")
    wanted, magnitude = yarn_angles(rope, factor), yarn_magnitude(rope, factor)
    plain = RopeConfig(rope.base, rope.dim, "neox", "yarn", factor, rope.original)
    own = 1.0 + 0.1 * math.log(factor)
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": rope.original,
        **({} if math.isclose(magnitude, own, rel_tol=1e-6) else {_ATTENTION: magnitude / own}),
    }
    if _same(plain, wanted):
        return Said(keys)
    if rope.architecture == "llama":
        return Said({_ATTENTION: magnitude}, (rope.plain / wanted).astype(np.float32))
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if _same(replace(plain, beta_fast=fast, beta_slow=slow), wanted):
        return Said(
            keys | {"rope.scaling.yarn_beta_fast": fast, "rope.scaling.yarn_beta_slow": slow},
            note=f"llama.cpp reads no beta_fast={fast:g}, beta_slow={slow:g} in {rope.architecture} files and runs 32 "
            "and 1; specsparse runs what the file says",
        )
    what = "truncate=false" if rope.values.get("truncate") is False else f"beta_fast={fast:g}, beta_slow={slow:g}"
    raise UserError(f"{rope.where}: rope scaling 'yarn' with {what} has no place in a {rope.architecture} GGUF file")


def _same(rope: RopeConfig, wanted: np.ndarray) -> bool:
    return np.allclose(angles(rope)[0], wanted, rtol=1e-6, atol=0.0)
