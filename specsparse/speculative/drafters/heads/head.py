"""A head on the target's features, alone or after a lookup."""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Self

from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.llama import make_layers
from specsparse.engine.model import Model
from specsparse.speculative.drafters.heads import eagle3_file
from specsparse.speculative.drafters.heads.eagle3 import Eagle3Plan
from specsparse.speculative.drafters.heads.feature_source import of_target
from specsparse.speculative.drafters.heads.head_file import find, read_head
from specsparse.speculative.drafters.heads.head_source import HeadSource
from specsparse.speculative.drafters.lookup import Either, NGramSizes, PromptLookup
from specsparse.speculative.drafters.plan import (
    Bound,
    ChainDrafting,
    DrafterPlan,
    Drafting,
    HeadDrafting,
    Load,
    bytes_of,
    under,
)
from specsparse.speculative.policies.base import Policy
from specsparse.support.options import Inline

HEAD_P_MIN = 0.6
"""Top probability under which a head beside a lookup stops, where the length of a draft is fixed."""


@dataclasses.dataclass(frozen=True)
class HeadPlan(DrafterPlan):
    """One layer on the target's features, before the target's output matrix (EAGLE, arXiv:2401.15077).

    Without ids of its own it scores those of the head's file. A GGUF file of an EAGLE-3 head is one of `eagle3`.

    Attributes:
        head: its file, or a name; by default the one that was trained for the target.
    """

    head: str | Path | None = None
    drafting: Annotated[HeadDrafting, Inline()] = dataclasses.field(default=HeadDrafting(), kw_only=True)

    def prepare(self, target: Model, load: Load) -> Bound:
        """Reads the head's file; no model is loaded."""
        c, style = target.config, self.drafting
        path = find(self.head, target.params.output_norm)
        f = open_gguf(path)
        if f.get("general.architecture", "str", "") == eagle3_file.ARCHITECTURE:
            return Eagle3Plan(eagle3_file.read_gguf(f), drafting=self.drafting).prepare(target, load)
        found = read_head(path, c, floats=target.kernels.name != "native")
        if style.draft_vocab is None:
            style = dataclasses.replace(style, draft_vocab=tuple(found.ids.tolist()))
        weights, columns = style.trim(target, target.params.output, c.vocab_size)
        source = HeadSource(
            **of_target(target, columns),
            layers=make_layers(c.plain, target.kernels),
            eps=c.norm_eps,
            width=c.d_model,
            kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            tree_rows=0 if style.shape is None else style.shape.max_rows,
            features=(*found.below, c.n_layers) if found.below else (),
        )
        weights = weights._replace(params=found.params)
        reads = bytes_of(found.params.layer, found.params.fc_token, found.params.fc_hidden, weights.head)
        return Bound(style.drafter(source, target), lambda capacity: weights, reads)


@dataclasses.dataclass(frozen=True)
class LookupHeadPlan(DrafterPlan, NGramSizes):
    """Prompt lookup where the text repeats itself, else a head. Each is under the policy; its gamma is that of both.

    Attributes:
        head: its file, or a name; by default the one that was trained for the target.
    """

    head: str | Path | None = None
    drafting: Annotated[ChainDrafting, Inline()] = dataclasses.field(default=ChainDrafting(), kw_only=True)

    def __post_init__(self):
        NGramSizes.__post_init__(self)
        assert self.second  # options that exclude each other are found before a model is loaded

    @functools.cached_property
    def second(self) -> HeadPlan:
        """The head, which stops early by default where the length of a draft is fixed."""
        how = self.drafting
        fixed = how.policy is None and how.max_nodes is not None
        ends = how.p_min if how.p_min is not None else HEAD_P_MIN if fixed else 0.0
        given = {field.name: getattr(how, field.name) for field in dataclasses.fields(how)}
        full = HeadDrafting(**given | {"p_min": ends})
        return HeadPlan(head=self.head, drafting=full)

    @functools.cached_property
    def first(self) -> PromptLookup:
        """The lookup; a policy that is put upon the plan later leaves it the room it had."""
        gamma = self.drafting.max_nodes or self.second.max_nodes
        return PromptLookup(self.ngram_max, self.ngram_min, gamma)

    @property
    def style(self) -> Drafting:
        """The head's."""
        return self.second.drafting

    @property
    def max_nodes(self) -> int:
        """K of the two."""
        return max(self.first.max_nodes, self.second.max_nodes)

    def under(self, policy: Policy) -> Self:
        """The same with that policy."""
        how = dataclasses.replace(under(self.drafting, policy), max_nodes=self.first.max_nodes)
        return dataclasses.replace(self, drafting=how)

    def prepare(self, target: Model, load: Load) -> Bound:
        """Reads the head's file."""
        bound = self.second.prepare(target, load)
        return bound._replace(drafter=Either(self.first, bound.drafter))
