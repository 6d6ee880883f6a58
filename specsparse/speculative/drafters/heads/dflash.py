"""A block drafter: one forward drafts a block of tokens from the target's features (DFlash, arXiv:2602.06036)."""

import dataclasses
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.rope import rope_tables
from specsparse.engine.weights import pack_matrix
from specsparse.errors import UserError
from specsparse.kernels import QTensor
from specsparse.kernels.packing.rows import take_rows
from specsparse.speculative.drafters.heads.dflash_block import BlockLayer, BlockWeights
from specsparse.speculative.drafters.heads.dflash_file import EMBEDDING, OUTPUT, DFlashFile
from specsparse.speculative.drafters.heads.dflash_source import BlockSource, DFlashParams
from specsparse.speculative.drafters.options import DFlashOptions
from specsparse.speculative.drafters.plan import Bound, DrafterPlan, MakeModel, bytes_of
from specsparse.speculative.drafters.sources import DraftWeights, VocabMap
from specsparse.speculative.drafters.style import Style


@dataclasses.dataclass(frozen=True)
class DFlashPlan(DrafterPlan, DFlashOptions):
    """A block drafter on the target's features, with the target's embedding and output matrix or its own."""

    def prepare(self, target: Model, make: MakeModel) -> Bound:
        """Reads the drafter's file; no model is loaded."""
        file = self._file(make)
        rows = self._rows(file)
        positions = rows - (0 if file.from_anchor else 1)
        tree = self.style.tree
        if tree is not None and tree.max_depth > positions:
            raise UserError(
                f"a tree of depth {tree.max_depth} is deeper than the {positions} tokens of a block of {file.path}"
            )
        check_target(file, target)
        floats = target.kernels.name != "native"
        weights, columns = _scored(file, self.style, target, floats=floats)
        block, embedding = _packed(file, floats=floats)
        source = BlockSource(
            vocab=VocabMap(target.config.vocab_size, target.config.vocab_size, columns),
            kernels=target.kernels,
            shape=file.shape,
            rows=rows,
            skipped=rows - positions,
            mask_token=file.mask_token,
            context=target.config.context_length,
            kv_dtype=target.cache_dtype,
            levels=0 if tree is None else tree.max_depth,
            embedding_scale=file.embedding_scale,
            logit_scale=file.logit_scale,
            softcap=file.softcap,
        )
        tables: dict[int, DraftWeights] = {}

        def weights_for(capacity: int) -> DraftWeights:
            if capacity not in tables:
                cos, sin = rope_tables(file.rope, source.capacity(capacity), file.rope_factors)
                params = DFlashParams(block, jnp.asarray(cos), jnp.asarray(sin), embedding)
                tables[capacity] = weights._replace(params=params)
            return tables[capacity]

        reads = bytes_of(block, weights.head) // positions
        return Bound(self.style.drafter(source, target), weights_for, reads)

    def _file(self, make: MakeModel) -> DFlashFile:
        if isinstance(self.path, DFlashFile):
            return self.path
        if not isinstance(self.path, str | Path) or not str(self.path):
            raise UserError("drafter.path: a value is needed, the drafter's folder or GGUF file, or hf://owner/repo")
        if make.dflash is None:
            raise UserError("drafter.path: no file can be read here: hand over a DFlashFile")
        return make.dflash(os.fspath(self.path))

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


def check_target(file: DFlashFile, target: Model) -> None:
    """Whether a drafter is one for that target.

    Raises:
        UserError: it was made for a model of other shapes or another vocabulary.
    """
    c, s = target.config, file.shape
    outside = [layer for layer in s.features if not 0 <= layer <= c.n_layers]
    if outside:
        raise UserError(
            f"{file.path}: reads the target's features at layer {outside[0]}; {target.path.name} has layers 0 to "
            f"{c.n_layers - 1}, and {c.n_layers} for what comes out"
        )
    own = [name for name in (EMBEDDING, OUTPUT) if name in file.tensors]
    if s.feature_width != c.d_model or (s.width != c.d_model and len(own) < 2):
        raise UserError(
            f"{file.path}: is for a target of width {s.feature_width} (its own is {s.width}), {target.path.name} has "
            f"{c.d_model}"
        )
    known = file.tensors[EMBEDDING][0] if EMBEDDING in file.tensors else target.params.embedding.shape[0]
    if not 0 <= file.mask_token < known:
        raise UserError(f"{file.path}: its mask token is {file.mask_token}, the embedding has ids 0 to {known - 1}")
    if EMBEDDING in file.tensors and known < c.vocab_size:
        raise UserError(f"{file.path}: embeds {known} ids, {target.path.name} has {c.vocab_size}")
    scored = file.tensors[OUTPUT][0] if OUTPUT in file.tensors else c.vocab_size
    if file.ids is None and scored < c.vocab_size:
        raise UserError(
            f"{file.path}: scores {scored} ids without saying which (no d2t); the target has {c.vocab_size}"
        )
    if file.ids is not None and file.ids.max() >= c.vocab_size:
        raise UserError(f"{file.path}: drafts id {file.ids.max()}, {target.path.name} has {c.vocab_size} ids")


def _scored(file: DFlashFile, style: Style, target: Model, *, floats: bool) -> tuple[DraftWeights, int]:
    """The output matrix, its ids where they are not all, and how many columns logits have."""
    vocab = target.config.vocab_size
    if file.ids is not None and style.vocab is not None:
        raise UserError(f"drafter.draft_vocab: {file.path} has a vocabulary of its own, of {len(file.ids)} ids")
    if OUTPUT not in file.tensors:
        if file.ids is not None:
            style = dataclasses.replace(style, vocab=tuple(file.ids.tolist()))
        weights, columns = style.trim(target, target.params.output, vocab)
        return weights if weights.head is not None else weights._replace(head=target.params.output), columns
    head = pack_matrix(file.load(OUTPUT), floats=floats)
    if file.ids is None:
        weights, columns = style.trim(target, head, vocab)
        if weights.head is None:
            weights = weights._replace(head=head if head.shape[0] == vocab else take_rows(head, np.arange(vocab)))
        return weights, columns
    order = np.argsort(file.ids, kind="stable")
    if (np.diff(order) != 1).any():
        head = take_rows(head, order)
    return DraftWeights.scoring(head, file.ids[order], vocab), len(file.ids)


def _packed(file: DFlashFile, *, floats: bool) -> tuple[BlockWeights, QTensor | None]:
    """The layers, and the embedding where it is not the target's."""

    def matrix(name: str) -> QTensor:
        return pack_matrix(file.load(name), floats=floats)

    def vector(name: str):
        return jnp.asarray(np.ascontiguousarray(file.load(name).dequantize(), np.float32).reshape(-1))

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
