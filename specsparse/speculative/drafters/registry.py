"""Drafters by name, with the option names of llama.cpp, vLLM and Hugging Face."""

from typing import Any

from specsparse.errors import UserError
from specsparse.speculative.base import Drafter
from specsparse.speculative.drafters.ngram import NGram
from specsparse.speculative.drafters.scripted import Scripted
from specsparse.speculative.drafters.suffix import Suffix
from specsparse.speculative.drafters.synthetic import Synthetic, SyntheticRates
from specsparse.speculative.options import MAX_GAMMA, Factory, Option, gamma_option, nearest
from specsparse.speculative.tree import TreeTemplate

GAMMA = gamma_option()


def _prompt_lookup(nodes: int = 10, ngram_max: int | None = None, ngram_min: int | None = None) -> NGram:
    """A bound that is not given adapts to the one that is; 1..3 where neither is."""
    low = ngram_min if ngram_min is not None else 1
    high = ngram_max if ngram_max is not None else max(3, low)
    return NGram.prompt_lookup(nodes, high, low)


def _synthetic(
    nodes: int = 4,
    process: str = "geometric",
    rate: float | None = None,
    length: float | None = None,
    rates: Any = None,
) -> Synthetic:
    """From a rate (0.7 if nothing is said), a mean acceptance length, or a rate for each position."""
    if rates is not None:
        if rate is not None or length is not None:
            raise UserError("drafter.rates excludes drafter.rate and drafter.length")
        try:
            return Synthetic(SyntheticRates.from_unconditional(tuple(float(r) for r in rates)))
        except (TypeError, ValueError) as error:
            raise UserError(f"drafter.rates={rates!r} must be a list of numbers") from error
    if rate is None and length is None:
        rate = 0.7
    return Synthetic(getattr(SyntheticRates, process)(nodes, rate=rate, length=length))


def _scripted(
    nodes: int = 4,
    accept: Any = None,
    vocab_size: int = 256,
    truth: Any = (),
    template: TreeTemplate | None = None,
    ends: Any = (),
) -> Scripted:
    """A chain with `accept` right tokens a round (by default all), or a tree with the `ends` of its right paths."""
    truth = tuple(int(token) for token in truth)
    if template is not None:
        return Scripted(template, tuple(ends), vocab_size, truth)
    return Scripted.chain(nodes, (nodes,) if accept is None else tuple(accept), vocab_size=vocab_size, truth=truth)


_SIZE_N = Option(high=64, aliases=("ngram_size_n", "spec_ngram_size_n"))
_SIZE_M = Option(aliases=("ngram_size_m", "spec_ngram_size_m"))

DRAFTERS: dict[str, Factory] = {
    "prompt_lookup": Factory(
        _prompt_lookup,
        {
            "nodes": GAMMA,
            "ngram_max": Option(high=64, aliases=("prompt_lookup_max", "max_matching_ngram_size")),
            "ngram_min": Option(high=64, aliases=("prompt_lookup_min",)),
        },
    ),
    "ngram_simple": Factory(NGram.ngram_simple, {"nodes": GAMMA, "size_n": _SIZE_N, "size_m": _SIZE_M}),
    "ngram_map": Factory(
        NGram.ngram_map,
        {
            "nodes": GAMMA,
            "size_n": _SIZE_N,
            "size_m": _SIZE_M,
            "min_hits": Option(high=2**30, aliases=("ngram_min_hits", "spec_ngram_min_hits")),
        },
    ),
    "suffix": Factory(
        Suffix,
        {
            "nodes": GAMMA,
            "longest": Option(high=4096, aliases=("suffix_decoding_max_tree_depth",)),
            "min_match": Option(high=4096),
            "factor": Option(float, 0.01, 1024, aliases=("suffix_decoding_max_spec_factor",)),
            "offset": Option(low=-MAX_GAMMA),
            "min_share": Option(float, 0, 1, aliases=("suffix_decoding_min_token_prob",)),
            "candidates": Option(high=64),
        },
    ),
    "synthetic": Factory(
        _synthetic,
        {
            "nodes": GAMMA,
            "process": Option(str, choices=("geometric", "minimum_variance")),
            "rate": Option(float, 0, 1),
            "length": Option(
                float, 1, MAX_GAMMA + 1, aliases=("synthetic_acceptance_length", "spec_synthetic_acceptance_length")
            ),
            "rates": None,
        },
    ),
    "scripted": Factory(
        _scripted,
        {
            "nodes": GAMMA,
            "accept": None,
            "vocab_size": Option(low=2, high=2**31 - 1),
            "truth": None,
            "template": None,
            "ends": None,
        },
    ),
}
"""Factories by name; `register` adds to them."""

ALIASES = {
    "ngram": "prompt_lookup",
    "ngram-simple": "ngram_simple",
    "ngram-map-k": "ngram_map",
}
"""Names that other projects give to the same drafters."""


def register(name: str, factory: Factory, *, aliases: tuple[str, ...] = ()) -> None:
    """Makes a drafter known to `get_drafter`. A name can be given once."""
    if name in DRAFTERS:
        raise ValueError(f"drafter {name} is registered already")
    DRAFTERS[name] = factory
    ALIASES.update(dict.fromkeys(aliases, name))


def get_drafter(name: str, **options: Any) -> Drafter:
    """The drafter of that name, with its options under their own or other projects' names.

    Raises:
        UserError: unknown name or option (with the nearest valid one), or a value out of range.
    """
    key = ALIASES.get(name, name)
    if key not in DRAFTERS:
        raise UserError(f"drafter={name} is unknown; {nearest(name, [*DRAFTERS, *ALIASES])}")
    return DRAFTERS[key].make("drafter", name, options)
