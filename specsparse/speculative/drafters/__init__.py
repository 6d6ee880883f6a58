"""Drafters, which propose tokens, by name, with the option names of llama.cpp, vLLM and Hugging Face.

Importing this costs no jax.
"""

from typing import TYPE_CHECKING

from specsparse.errors import UserError
from specsparse.speculative.base import GAMMA_NAMES, DraftKind
from specsparse.speculative.verifiers import BUILTIN
from specsparse.support.neighbours import METHODS
from specsparse.support.registry import Registry

if TYPE_CHECKING:
    from specsparse.speculative.base import Drafter
    from specsparse.speculative.drafters.spec import DrafterSpec

DRAFTERS: "Registry[Drafter | DrafterSpec]" = Registry(
    "drafter",
    ("specsparse.speculative.base:Drafter", "specsparse.speculative.drafters.spec:DrafterSpec"),
    "specsparse.speculative.drafters",
    {
        "prompt_lookup": "lookup:PromptLookup",
        "ngram_simple": "lookup:NGramSimple",
        "ngram_map": "lookup:NGramMap",
        "suffix": "lookup:Suffix",
        "recycle": "recycle:Recycle",
        "synthetic": "synthetic:Synthetic",
        "model": "draft_model:DraftModel",
        "layer_skip": "self_draft:LayerSkip",
        "sparse_self": "self_draft:SparseSelf",
        "sparse_kv": "sparse_kv:SparseKv",
        "head": "heads.head:Head",
        "lookup_head": "heads.head:LookupHead",
        "mixed": "mixed:Mixed",
        "eagle3": "heads.eagle3:Eagle3",
        "dflash": "heads.dflash:DFlash",
        "dspark": "heads.dspark:DSpark",
        "scripted": "synthetic:Scripted",
    },
    aliases=METHODS,
)
"""Drafters by name, with other projects' names. A drafter that needs a model is a `DrafterSpec`."""

register = DRAFTERS.register
"""Makes a class known by name: `register("mine", MyDrafter, aliases=("my-own",))`. A name can be given once."""

DRAWS_COLDER = 0.75
"""Default temperature of a head's draws, over the target's: a head is less sure than its target, and p and q have more
in common if it draws colder (docs/LOG.md)."""


def draw_temperature(verifier: str, temperature: float) -> float | None:
    """The temperature of drafts for a target at `temperature` if the verifier is one of lossless ones that weigh p
    against q on chains; None if argmax drafts do."""
    known = BUILTIN.get(verifier)
    if known is None or not (known.needs_p and known.lossless) or known.tree or DraftKind.SAMPLED not in known.kinds:
        return None
    return DRAWS_COLDER * temperature if temperature > 0 else None


def get_drafter(name: str, **options: object) -> "Drafter | DrafterSpec":
    """The drafter of that name or `module:Class`, with its options under their own or other projects' names.

    A drafter that needs a model comes as a spec, to be built for a target; `specsparse.generate` does that. UserError
    for an unknown name or option (with the nearest valid one), or a value out of range.
    """
    named = _own_names(name)
    if "max_nodes" in named:  # everybody's names of it, for a class that does not list them
        options = {"max_nodes" if key in GAMMA_NAMES and key not in named else key: options[key] for key in options}
    made = DRAFTERS.make(name, options)
    made.check()
    return made


def check_is_drafter(value: object) -> None:
    """UserError for an object of another type."""
    from specsparse.speculative.base import AnyDrafter

    if not isinstance(value, AnyDrafter):
        raise UserError(f"drafter must be a registered name or a Drafter, not {type(value).__name__}")


def takes(name: str) -> frozenset[str]:
    """Names of a drafter's options; empty for an unknown drafter; UserError for a `module:Class` that is not there."""
    named = _own_names(name) if DRAFTERS.holds(name) else frozenset()
    return named | set(GAMMA_NAMES) if "max_nodes" in named else named


def _own_names(name: str) -> frozenset[str]:
    return frozenset(word for option in DRAFTERS.options(name).values() for word in (option.name, *option.aliases))
