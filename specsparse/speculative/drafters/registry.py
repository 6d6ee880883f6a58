"""Drafters by name, with the option names of llama.cpp, vLLM and Hugging Face."""

import math
from functools import partial
from typing import Any

from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.drafters.ngram import NGram
from specsparse.speculative.drafters.plan import (
    DrafterPlan,
    HeadPlan,
    LayerSkipPlan,
    LookupHeadPlan,
    ModelPlan,
    SparseSelfPlan,
    Style,
    read_id_list,
    read_ids,
)
from specsparse.speculative.drafters.scripted import Scripted
from specsparse.speculative.drafters.suffix import Suffix
from specsparse.speculative.drafters.synthetic import Synthetic, SyntheticRates
from specsparse.speculative.options import MAX_GAMMA, Factory, Option, gamma_option, nearest
from specsparse.speculative.policies.base import SHORT_GAMMA, Fixed, PMin, Policy
from specsparse.speculative.tree import TreeTemplate
from specsparse.speculative.trees import TreeShape, get_tree
from specsparse.support.registry import Registry

GAMMA = gamma_option()


def _prompt_lookup(nodes: int = SHORT_GAMMA, ngram_max: int | None = None, ngram_min: int | None = None) -> NGram:
    """A bound that is not given adapts to the one that is; 2..3 where neither is (1..3 in the original: one-token
    matches draft more than they win)."""
    low = ngram_min if ngram_min is not None else min(2, ngram_max or 2)
    high = ngram_max if ngram_max is not None else max(3, low)
    return NGram.prompt_lookup(nodes, high, low)


def _synthetic(nodes: int = 4, **rates: Any) -> Synthetic:
    return Synthetic(SyntheticRates.of(nodes, **rates))


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


def _style(
    nodes: int | None = None,
    temperature: float = 0.0,
    draw: str | None = None,
    p_min: float = 0.0,
    n_min: int = 0,
    policy: Policy | None = None,
    draft_vocab: Any = None,
    tree: TreeShape | str | None = None,
    **truncation: Any,
) -> Style:
    """Argmax drafts at temperature 0, drawn ones above, unless `draw` says otherwise; `policy` excludes its parts.

    Where nothing says how long drafts are, the length is free.
    """
    free = nodes is None and policy is None and tree is None and p_min == n_min == 0
    nodes = SHORT_GAMMA if nodes is None else nodes
    shape = get_tree(tree) if isinstance(tree, str) else tree
    if not isinstance(shape, TreeShape | None):
        raise UserError(f"drafter.tree is a tree or the name of one, not {type(shape).__name__}")
    if policy is None and shape is not None:
        nodes = shape.max_nodes
    if policy is None:
        policy = PMin(nodes, n_min, p_min) if p_min > 0 else Fixed(nodes, n_min)
    elif not isinstance(policy, Policy):
        raise UserError(f"drafter.policy is a Policy, not {type(policy).__name__}")
    elif p_min > 0 or n_min > 0:
        raise UserError("drafter.p_min and drafter.n_min are for drafts of a fixed length: choose policy=fixed too")
    sampling = SamplingParams(temperature=temperature, **truncation)
    draw = draw or ("argmax" if sampling.greedy else "sampled")
    first, ids = read_ids(draft_vocab)
    return Style(policy, sampling, _DRAWS[draw], shape, ids, first, free)


def _model(model: Any = None, special_tokens: str | None = None, **style: Any) -> ModelPlan:
    return ModelPlan(_style(**style), model, special_tokens)


def _layer_skip(layers: Any = None, **style: Any) -> LayerSkipPlan:
    try:
        chosen = None if layers is None else tuple(int(layer) for layer in layers)
    except (TypeError, ValueError) as error:
        raise UserError(f"drafter.layers={layers!r} must be a list of layers") from error
    return LayerSkipPlan(_style(**style), chosen)


def _sparse_self(rule: str = "hot", share: Any = None, threshold: Any = None, text: Any = None, **style: Any) -> Any:
    if (rule == "own") != (threshold is not None) or (rule == "own" and share is not None):
        raise UserError("drafter.threshold goes with rule=own, and drafter.share with rule=hot and rule=gate")
    if rule == "own" and text is not None:
        raise UserError("drafter.text goes with rule=hot and rule=gate, which choose neurons by it")
    ids = None if text is None else read_id_list(text, "text")
    if ids == ():
        raise UserError("drafter.text holds no ids: give some, or leave it out for a text that the target writes")
    return SparseSelfPlan(_style(**style), rule, share, threshold, ids)


def _head(head: Any = None, **style: Any) -> HeadPlan:
    return HeadPlan(_style(**style), None if head is None else str(head))


def _lookup_head(
    head: Any = None,
    nodes: int | None = None,
    ngram_max: int | None = None,
    ngram_min: int | None = None,
    p_min: float | None = None,
    **style: Any,
) -> LookupHeadPlan:
    """Each of the two is under the policy; its gamma is that of both. `p_min` is the head's, by default 0.6 where the
    length of a draft is fixed and 0 under a policy."""
    policy = style.get("policy")
    fixed = policy is None and nodes is not None
    plan = _head(head, nodes=nodes, p_min=p_min if p_min is not None else 0.6 if fixed else 0.0, **style)
    return LookupHeadPlan(_prompt_lookup(plan.max_nodes, ngram_max, ngram_min), plan)


_DRAWS = {
    "argmax": DraftKind.ONE_HOT,
    "greedy": DraftKind.ONE_HOT,
    "sampled": DraftKind.SAMPLED,
    "probabilistic": DraftKind.SAMPLED,
}

_STYLE: dict[str, Option | None] = {
    "nodes": GAMMA,
    "temperature": Option(float, 0, 1e4, aliases=("draft_temperature",)),
    "top_k": Option(low=-1, high=2**31 - 1),
    "top_p": Option(float, 0, 1),
    "min_p": Option(float, 0, 1),
    "draw": Option(str, choices=tuple(_DRAWS), aliases=("draft_sample_method",)),
    "p_min": Option(float, 0, 1, aliases=("draft_p_min",)),
    "n_min": Option(low=0, aliases=("draft_min",)),
    "policy": None,
    "draft_vocab": None,
    "tree": None,
}
"""What every drafter with a model takes."""

_LOOKUP_STYLE = {name: _STYLE[name] for name in ("nodes", "temperature", "p_min", "policy", "draft_vocab")}
"""What a chain beside a lookup can take of it."""

_NGRAM_MAX = Option(high=64, aliases=("prompt_lookup_max", "max_matching_ngram_size"))
_NGRAM_MIN = Option(high=64, aliases=("prompt_lookup_min",))
_SIZE_N = Option(high=64, aliases=("ngram_size_n", "spec_ngram_size_n"))
_SIZE_M = Option(aliases=("ngram_size_m", "spec_ngram_size_m"))

DRAFTERS: dict[str, Factory] = {
    "prompt_lookup": Factory(
        _prompt_lookup,
        {
            "nodes": GAMMA,
            "ngram_max": _NGRAM_MAX,
            "ngram_min": _NGRAM_MIN,
        },
    ),
    "ngram_simple": Factory(
        partial(NGram.ngram_simple, nodes=SHORT_GAMMA), {"nodes": GAMMA, "size_n": _SIZE_N, "size_m": _SIZE_M}
    ),
    "ngram_map": Factory(
        partial(NGram.ngram_map, nodes=SHORT_GAMMA),
        {
            "nodes": GAMMA,
            "size_n": _SIZE_N,
            "size_m": _SIZE_M,
            "min_hits": Option(high=2**30, aliases=("ngram_min_hits", "spec_ngram_min_hits")),
        },
    ),
    "suffix": Factory(
        partial(Suffix, nodes=SHORT_GAMMA),
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
    "model": Factory(_model, {"model": None, "special_tokens": Option(str, choices=("target",)), **_STYLE}),
    "layer_skip": Factory(_layer_skip, {"layers": None, **_STYLE}),
    "sparse_self": Factory(
        _sparse_self,
        {
            "rule": Option(str, choices=("hot", "gate", "own")),
            "share": Option(float, 1e-3, 1),
            "threshold": Option(float, -math.inf, math.inf),
            "text": None,
            **_STYLE,
        },
    ),
    "head": Factory(_head, {"head": None, **_STYLE}),
    "lookup_head": Factory(
        _lookup_head, {"head": None, "ngram_max": _NGRAM_MAX, "ngram_min": _NGRAM_MIN, **_LOOKUP_STYLE}
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
    "draft_model": "model",
    "layer-skip": "layer_skip",
    "eagle": "head",
}
"""Names that other projects give to the same drafters."""


OUTSIDE: Registry[Drafter] = Registry("drafter", "specsparse.speculative.base:Drafter")
"""Drafters of other packages, and anybody's as `module:Class`. A `max_nodes` among the options is gamma, too."""


def register(name: str, factory: Factory, *, aliases: tuple[str, ...] = ()) -> None:
    """Makes a drafter known to `get_drafter`. A name can be given once."""
    if name in DRAFTERS:
        raise ValueError(f"drafter {name} is registered already")
    DRAFTERS[name] = factory
    ALIASES.update(dict.fromkeys(aliases, name))


def get_drafter(name: str, **options: Any) -> Drafter | DrafterPlan:
    """The drafter of that name or `module:Class`, with its options under their own or other projects' names.

    A drafter that needs a model comes as a plan, to be bound to a target; `specsparse.generate` does that.

    Raises:
        UserError: unknown name or option (with the nearest valid one), or a value out of range.
    """
    key = ALIASES.get(name, name)
    if key in DRAFTERS:
        return DRAFTERS[key].make("drafter", name, options)
    if not is_drafter(name):
        raise UserError(f"drafter={name} is unknown; {nearest(name, [*DRAFTERS, *ALIASES, *OUTSIDE.names()])}")
    known = _own_options(name)
    if "gamma" in options and "gamma" not in known and "max_nodes" in known:
        options["max_nodes"] = options.pop("gamma")
    return OUTSIDE.make(name, options)


def is_drafter(name: str) -> bool:
    """Whether the name is a drafter's, or has the form of one's `module:Class`."""
    return name in DRAFTERS or name in ALIASES or OUTSIDE.holds(name)


def takes(name: str) -> frozenset[str]:
    """Names of a drafter's options; empty for an unknown drafter.

    Raises:
        UserError: a `module:Class` that cannot be had.
    """
    factory = DRAFTERS.get(ALIASES.get(name, name))
    if factory is not None:
        return frozenset({*factory.options, "gamma"})
    known = _own_options(name) if OUTSIDE.holds(name) else frozenset()
    return known | {"gamma"} if "max_nodes" in known else known


def _own_options(name: str) -> frozenset[str]:
    """Of a class from elsewhere: its fields and their other names."""
    options = OUTSIDE.options(name).values()
    return frozenset(word for option in options for word in (option.name, *option.aliases))
