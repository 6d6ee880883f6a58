"""Drafters by name, with the option names of llama.cpp, vLLM and Hugging Face. jax is imported when one is made."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specsparse.speculative.drafters import options as own
from specsparse.speculative.gamma import GAMMA_NAMES
from specsparse.support.registry import Registry

if TYPE_CHECKING:
    from specsparse.speculative.base import Drafter
    from specsparse.speculative.drafters.plan import DrafterPlan

DRAFTERS: "Registry[Drafter | DrafterPlan]" = Registry(
    "drafter",
    ("specsparse.speculative.base:Drafter", "specsparse.speculative.drafters.plan:DrafterPlan"),
    "specsparse.speculative.drafters",
    {
        "prompt_lookup": ("ngram:NGram", own.PromptLookupOptions),
        "ngram_simple": ("ngram:NGram.ngram_simple", own.NgramSimpleOptions),
        "ngram_map": ("ngram:NGram.ngram_map", own.NgramMapOptions),
        "suffix": ("suffix:Suffix", own.SuffixOptions),
        "synthetic": "synthetic:Synthetic",
        "model": ("draft_model:ModelPlan", own.ModelOptions),
        "layer_skip": ("self_draft:LayerSkipPlan", own.LayerSkipOptions),
        "sparse_self": ("self_draft:SparseSelfPlan", own.SparseSelfOptions),
        "head": ("heads.head:HeadPlan", own.HeadOptions),
        "lookup_head": ("heads.head:LookupHeadPlan", own.LookupHeadOptions),
        "eagle3": ("heads.eagle3:Eagle3Plan", own.Eagle3Options),
        "dflash": ("heads.dflash:DFlashPlan", own.DFlashOptions),
        "scripted": ("scripted:Scripted.of", own.ScriptedOptions),
    },
    aliases={
        "ngram": "prompt_lookup",
        "ngram-simple": "ngram_simple",
        "ngram-map-k": "ngram_map",
        "draft_model": "model",
        "layer-skip": "layer_skip",
        "eagle": "head",
    },
)
"""Drafters, and the names that other projects give to the same ones. What needs a model is a plan of a drafter."""

register = DRAFTERS.register
"""Makes a class known by name: `register("mine", MyDrafter, aliases=("my-own",))`. A name can be given once."""


def get_drafter(name: str, **options: object) -> "Drafter | DrafterPlan":
    """The drafter of that name or `module:Class`, with its options under their own or other projects' names.

    A drafter that needs a model comes as a plan, to be bound to a target; `specsparse.generate` does that.

    Raises:
        UserError: unknown name or option (with the nearest valid one), or a value out of range.
    """
    made = DRAFTERS.make(name, _with_gamma(name, options))
    from specsparse.speculative.base import Drafter, check_facts

    if isinstance(made, Drafter):
        check_facts(made)
    return made


def takes(name: str) -> frozenset[str]:
    """Names of a drafter's options; empty for an unknown drafter.

    Raises:
        UserError: a `module:Class` that cannot be had.
    """
    options = DRAFTERS.options(name).values() if DRAFTERS.holds(name) else ()
    words = frozenset(word for option in options for word in (option.name, *option.aliases))
    return words | set(GAMMA_NAMES) if "max_nodes" in words else words


def _with_gamma(name: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """Everybody's names of `max_nodes` for a class that does not list them."""
    known = DRAFTERS.options(name)
    listed = {word for option in known.values() for word in (option.name, *option.aliases)}
    if "max_nodes" not in known or listed.issuperset(GAMMA_NAMES):
        return options
    return {"max_nodes" if key in GAMMA_NAMES and key not in listed else key: options[key] for key in options}
