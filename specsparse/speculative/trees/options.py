"""The options of the built-in trees; jax is not imported, so that a mistyped one is answered at once."""

from dataclasses import dataclass
from typing import Annotated, Literal

from specsparse.support.options import Also, Count, Range, Size

MAX_NODES = 64
"""Most nodes of a tree: what one verifying forward may hold."""

Nodes = Annotated[int, Range(1, MAX_NODES)]
Depth = Annotated[int, Range(1, MAX_NODES)]
Unit = Annotated[float, Range(0, 1)]
Rule = Literal["top", "iid", "wor"]


@dataclass(frozen=True)
class ChainOptions:
    """No tree: each drafted token follows the one before; its length is policy.gamma."""


@dataclass(frozen=True)
class TemplateOptions:
    """The same tree every round.

    Attributes:
        widths: children of every node, level by level.
        paths: instead, paths of ranks, such as [[0], [1], [0, 0], [0, 1]] (Medusa's notation).
    """

    widths: tuple[Count, ...] = (3, 2, 1)
    paths: tuple[tuple[Size, ...], ...] | None = None


@dataclass(frozen=True)
class StaticOptions(TemplateOptions):
    """The same tree every round, of the most likely tokens or of drawn ones.

    Attributes:
        draw: top, the most likely tokens; iid, drawn from q independently; wor, drawn without replacement.
    """

    draw: Rule = "top"


@dataclass(frozen=True)
class PSplitOptions:
    """llama.cpp's tree: a branch splits where a further token is likelier than `p_split`.

    Attributes:
        nodes: at most; llama.cpp's draft_max.
        n_parallel: branches at most.
        p_split: least probability of a token that begins a branch.
        p_min: a branch ends where its top probability is under it.
        depth: longest branch; by default `nodes`.
    """

    nodes: Annotated[Nodes, Also("draft_max")] = 16
    n_parallel: Nodes = 4
    p_split: Annotated[Unit, Also("draft_p_split")] = 0.1
    p_min: Annotated[Unit, Also("draft_p_min")] = 0.0
    depth: Depth | None = None


@dataclass(frozen=True)
class DynamicOptions:
    """Expand where the draft is confident, verify the most confident nodes of all (EAGLE-2, arXiv:2406.16858).

    Attributes:
        total: nodes verified (EAGLE-2: 60).
        depth: levels (EAGLE-2: 7).
        top_k: nodes expanded a level, and children of each (EAGLE-2: 10).
    """

    total: Annotated[Nodes, Also("nodes")] = 15
    depth: Depth = 5
    top_k: Annotated[int, Range(1, 32)] = 4


@dataclass(frozen=True)
class DDTreeOptions:
    """The most likely paths of a drafted block (DDTree, arXiv:2604.12989); for drafter=dflash.

    Attributes:
        nodes: verified at most.
        depth: longest path.
        top_k: tokens looked at for each position; as many as `nodes` for the best tree of all.
    """

    nodes: Annotated[Nodes, Also("total")] = 15
    depth: Depth = 5
    top_k: Annotated[int, Range(1, MAX_NODES)] = 8


@dataclass(frozen=True)
class SequoiaOptions:
    """The tree with the highest predicted speed, by Sequoia's dynamic programme (arXiv:2402.12374).

    Attributes:
        acceptance: chance that the child of each rank is the accepted one; null: measured on the built-in prompts, a
            guess in the API.
        cost: times of a round that verifies 0, 1, .. nodes, in plain steps; null: measured on this machine, in the API
            the same for every node.
        level_cost: time to draft one level, in plain steps; null: measured, 0 in the API.
        nodes: at most.
        depth: at most.
        draw: as of a static tree.
    """

    acceptance: tuple[float, ...] | None = None
    cost: tuple[float, ...] | None = None
    level_cost: Annotated[float | None, Range(0, 1e6)] = None
    nodes: Nodes = 15
    depth: Depth = 6
    draw: Rule = "top"
