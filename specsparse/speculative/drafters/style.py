"""How a drafter with a model drafts, made of the options that say so: policy, sampling, tree, ids it scores."""

import dataclasses

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.kernels import Matrix, take_rows
from specsparse.speculative.base import Drafter, DraftKind
from specsparse.speculative.draft_law import DraftLaw
from specsparse.speculative.drafters.chain import ModelDrafter
from specsparse.speculative.drafters.options import Drafting
from specsparse.speculative.drafters.sources import DraftWeights, Source
from specsparse.speculative.drafters.tree import TreeDrafter
from specsparse.speculative.gamma import SHORT_GAMMA
from specsparse.speculative.policies.base import Fixed, PMin, Policy, check_policy
from specsparse.speculative.trees import get_tree
from specsparse.speculative.trees.base import TreeShape


@dataclasses.dataclass(frozen=True)
class Style:
    """How a model drafter drafts, whatever model it has; made of the options that say so. Hashable.

    Attributes:
        policy: how many tokens, and when to stop.
        sampling: the draft's own temperature and truncation.
        draw: how the tokens of a chain are drawn.
        tree: shape of the drafts, None for a chain. It draws as it says, and the policy is then a budget.
        vocab: ids to score (FR-Spec's trimming): these, or the first so many and those that end a text; None for all.
        free: nobody said how long drafts are: `policy` may be replaced by one that suits the target and the machine.
    """

    policy: Policy
    sampling: SamplingParams
    draw: DraftKind
    tree: TreeShape | None = None
    vocab: int | tuple[int, ...] | None = None
    free: bool = False

    def __post_init__(self):
        check_policy(self.policy, self.kind)
        if self.tree is not None and self.policy.needs:
            raise UserError("p_min, confidence and entropy end chains; a tree has options of its own")
        self._check_siblings()

    @classmethod
    def of(cls, how: Drafting) -> "Style":
        """Of options. Argmax drafts at temperature 0, drawn ones above, unless `draw` says otherwise.

        Raises:
            UserError: options that exclude each other, such as a policy and its parts.
        """
        shape = get_tree(how.tree) if isinstance(how.tree, str) else how.tree
        if not isinstance(shape, TreeShape | None):
            raise UserError(f"drafter.tree is a tree or the name of one, not {type(shape).__name__}")
        policy, ends = how.policy, how.p_min or 0.0
        free = how.max_nodes is None and policy is None and shape is None and ends == how.n_min == 0
        if policy is None:
            nodes = shape.max_nodes if shape is not None else how.max_nodes or SHORT_GAMMA
            policy = PMin(nodes, how.n_min, ends) if ends > 0 else Fixed(nodes, how.n_min)
        elif not isinstance(policy, Policy):
            raise UserError(f"drafter.policy is a Policy, not {type(policy).__name__}")
        elif ends > 0 or how.n_min > 0:
            raise UserError("drafter.p_min and drafter.n_min are for drafts of a fixed length: choose policy=fixed too")
        sampling = SamplingParams(temperature=how.temperature or 0.0, top_k=how.top_k, top_p=how.top_p, min_p=how.min_p)
        drawn = how.draw in ("sampled", "probabilistic") if how.draw else not sampling.greedy
        return cls(policy, sampling, DraftKind.SAMPLED if drawn else DraftKind.ONE_HOT, shape, how.draft_vocab, free)

    @property
    def kind(self) -> DraftKind:
        """How the tokens are drawn."""
        return self.draw if self.tree is None else self.tree.kind

    def _check_siblings(self) -> None:
        """Refuses drawn siblings at temperature 0, where one token has all the mass."""
        outcome = {DraftKind.IID: "are all equal", DraftKind.WOR: "after the first have no mass"}.get(self.kind)
        if outcome and self.tree is not None and self.tree.branches and self.sampling.greedy:
            raise UserError(
                f"siblings drawn as by tree=sampled_{self.kind.value} {outcome} at "
                f"drafter.temperature={self.sampling.temperature:g}: set it above 0, or choose tree=static"
            )

    def ids(self, target: Model, available: int) -> np.ndarray | None:
        """The ids to score, ascending, of those below `available`; None for all."""
        if self.vocab is None:
            return None
        if isinstance(self.vocab, int):
            wanted = {*range(min(self.vocab, available)), *(i for i in target.tokenizer.stop_ids if i < available)}
        else:
            wanted = set(self.vocab)
        outside = [i for i in wanted if not 0 <= i < available]
        if outside or not wanted:
            raise UserError(f"drafter.draft_vocab holds {outside[:1] or 'no ids'}; ids lie in 0..{available - 1}")
        return np.array(sorted(wanted), np.int32)

    def drafter(self, source: Source, target: Model) -> Drafter:
        """What drafts so with that source of logits, for that target."""
        law = DraftLaw(self.sampling, source.vocab.columns, target.sampling_kernels)
        if self.tree is not None and self.tree.independent and not source.independent:
            raise UserError(
                "tree=ddtree needs laws that do not depend on what was drafted before, those of drafter=dflash; "
                "choose tree=dynamic for this drafter"
            )
        if self.tree is not None:
            return TreeDrafter(source, law, self.tree)
        return ModelDrafter(source, law, self.policy, self.draw)

    def trim(
        self, target: Model, output: Matrix, columns: int, *, rows: np.ndarray | None = None
    ) -> tuple[DraftWeights, int]:
        """The rows of an output matrix that are scored, and how many; without trimming none and `columns`.

        `rows`: the ids of its rows, where row i is not id i: the matrix then always comes back, its ids ascending.

        Raises:
            UserError: no row has an id that is to be scored.
        """
        ids = self.ids(target, columns)
        if rows is not None:
            order = np.argsort(rows)
            taken = order if ids is None else order[np.isin(rows[order], ids)]
            if not len(taken):
                raise UserError("drafter.draft_vocab holds none of the ids that the head scores")
            ids = rows[taken].astype(np.int32)
        elif ids is None:
            return DraftWeights(), columns
        else:
            taken = ids
        return DraftWeights.scoring(take_rows(output, taken), ids), len(ids)
