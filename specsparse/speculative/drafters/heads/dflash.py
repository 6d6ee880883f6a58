"""A block drafter: one forward drafts a block of tokens from the target's features (DFlash, arXiv:2602.06036)."""

import dataclasses
import functools
from typing import Annotated

import jax.numpy as jnp

from specsparse.engine.model import Model
from specsparse.engine.rope import rope_tables
from specsparse.engine.weights import pack_matrix
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.speculative.drafters.heads.dflash_block import BlockLayer, BlockWeights
from specsparse.speculative.drafters.heads.dflash_file import DFlashFile
from specsparse.speculative.drafters.heads.dflash_source import BlockSource, DFlashParams
from specsparse.speculative.drafters.heads.feature_source import of_target
from specsparse.speculative.drafters.heads.published import PublishedPlan, check_target, scored
from specsparse.speculative.drafters.heads.published_file import EMBEDDING
from specsparse.speculative.drafters.plan import Bound, Load, bytes_of
from specsparse.speculative.drafters.sources import DraftWeights
from specsparse.speculative.gamma import MAX_GAMMA
from specsparse.support.options import Range


@dataclasses.dataclass(frozen=True)
class DFlashPlan(PublishedPlan):
    """A block of tokens in one forward, from the target's features (DFlash, arXiv:2602.06036), with the target's
    embedding and output matrix or its own.

    Attributes:
        block_size: rows of a block, the last token among them; by default as many as it was trained for.
    """

    block_size: Annotated[int, Range(1, MAX_GAMMA)] | None = None
    reader = "specsparse.models.convert.dflash:read_dflash"

    def prepare(self, target: Model, load: Load) -> Bound:
        """Reads the drafter's file; no model is loaded."""
        file = self.head_file(load)
        rows = self._rows(file)
        positions = rows - (0 if file.from_anchor else 1)
        tree = self.drafting.shape
        if tree is not None and tree.max_depth > positions:
            raise UserError(
                f"a tree of depth {tree.max_depth} is deeper than the {positions} tokens of a block of {file.path}"
            )
        shape = file.shape
        check_target(file, target, layers=shape.features, width=shape.feature_width)
        known = file.tensors[EMBEDDING][0] if EMBEDDING in file.tensors else target.params.embedding.shape[0]
        if file.mask_token >= known:
            raise UserError(f"{file.path}: its mask token is {file.mask_token}, the embedding has ids 0 to {known - 1}")
        if file.ids is not None and self.drafting.draft_vocab is not None:
            raise UserError(f"drafter.draft_vocab: {file.path} has a vocabulary of its own, of {len(file.ids)} ids")
        floats = target.kernels.name != "native"
        weights, columns = scored(file, self.drafting, target, floats=floats)
        block, embedding = _packed(file, floats=floats)
        source = BlockSource(
            **of_target(target, columns),
            shape=shape,
            rows=rows,
            skipped=rows - positions,
            mask_token=file.mask_token,
            levels=0 if tree is None else tree.max_depth,
            embedding_scale=file.embedding_scale,
            logit_scale=file.logit_scale,
            softcap=file.softcap,
        )

        @functools.cache
        def weights_for(capacity: int) -> DraftWeights:
            cos, sin = rope_tables(file.rope, source.capacity(capacity), file.rope_factors)
            return weights._replace(params=DFlashParams(block, jnp.asarray(cos), jnp.asarray(sin), embedding))

        reads = bytes_of(block, weights.head) // positions
        return Bound(self.drafting.drafter(source, target), weights_for, reads)

    def _rows(self, file: DFlashFile) -> int:
        if self.block_size is None:
            return file.block_size
        least = 1 if file.from_anchor else 2
        if not least <= self.block_size <= file.block_size:
            raise UserError(
                f"drafter.block_size={self.block_size} must lie in {least}..{file.block_size}, the rows that "
                f"{file.path} was trained for"
            )
        return self.block_size


def _packed(file: DFlashFile, *, floats: bool) -> tuple[BlockWeights, QTensor | None]:
    """The layers, and the embedding where it is not the target's."""

    def matrix(name: str) -> QTensor:
        return pack_matrix(file.load(name), floats=floats)

    def vector(name: str):
        return jnp.asarray(file.values(name).reshape(-1))

    def layer(i: int) -> BlockLayer:
        names = {field: f"blk.{i}.{field}.weight" for field in BlockLayer._fields}
        return BlockLayer(**{f: (vector if f.endswith("norm") else matrix)(name) for f, name in names.items()})

    block = BlockWeights(
        fc=matrix("fc.weight"),
        hidden_norm=vector("enc.output_norm.weight"),
        layers=tuple(layer(i) for i in range(file.shape.layers)),
        output_norm=vector("output_norm.weight"),
    )
    return block, matrix(EMBEDDING) if EMBEDDING in file.tensors else None
