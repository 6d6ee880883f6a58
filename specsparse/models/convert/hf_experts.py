"""Experts of a checkpoint of transformers -> the stacked tensors of a GGUF file."""

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType, quants

from specsparse.errors import UserError
from specsparse.models.convert.write import Source

if TYPE_CHECKING:
    from specsparse.models.convert.hf import Checkpoint

_ONE = re.compile(
    r"model\.layers\.(\d{1,9})\.(?:mlp|block_sparse_moe)\.experts\.(\d{1,9})\.(gate|up|down)(?:_proj)?\.weight"
)
_ALL = re.compile(r"model\.layers\.(\d{1,9})\.mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales|)")
"""Of gpt-oss: a matrix of all experts [E, inputs, outputs], or in MXFP4 `_blocks` [E, outputs, blocks, 16] and
`_scales` [E, outputs, blocks], and `_bias` [E, outputs]. Outputs of gate and up stand in turn."""


def expert_sources(checkpoint: "Checkpoint", count: int) -> tuple[dict[str, Source], set[str]]:
    """The stacked tensors of `count` experts by their GGUF names, and the names of all that they are made of.
    UserError: an expert is missing, or has another shape than its neighbours."""
    stacks: dict[str, dict[int, str]] = {}
    sources, used = dict[str, Source](), set[str]()
    for name in checkpoint.shapes:
        one, whole = _ONE.fullmatch(name), _ALL.fullmatch(name)
        if one:
            stacks.setdefault(f"blk.{int(one[1])}.ffn_{one[3]}_exps.weight", {})[int(one[2])] = name
        elif whole:
            sources |= {source[0]: source for source in _of_all(checkpoint, name, *whole.groups())}
        if one or whole:
            used.add(name)
    for target, names in stacks.items():
        shapes = {checkpoint.shapes[name] for name in names.values()}
        if len(names) != count or max(names) >= count or len(shapes) != 1:
            raise UserError(f"{checkpoint.folder}: {target} needs {count} experts of one shape; it has {len(names)}")
        in_order = [names[i] for i in range(count)]
        load = lambda in_order=in_order: np.stack([checkpoint.load(name) for name in in_order])  # noqa: E731
        sources[target] = target, (count, *shapes.pop()), load
    return sources, used


def _of_all(checkpoint: "Checkpoint", name: str, layer: str, matrix: str, form: str) -> Iterator[Source]:
    """The sources that a tensor of `_ALL` is cut into; `_scales` are read beside `_blocks` and give none."""
    shape, scales = checkpoint.shapes[name], name.replace("_blocks", "_scales")
    if form == "_scales":
        return
    if scales not in checkpoint.shapes:
        raise UserError(f"{checkpoint.folder}: has {name} and no {scales}")
    right = len(shape) == {"": 3, "_bias": 2, "_blocks": 4}[form]
    if right and form == "_blocks":
        right = shape[3] == 16 and tuple(checkpoint.shapes[scales]) == tuple(shape[:3])
    if not right:
        raise UserError(f"{checkpoint.folder}: tensor {name} of shape {shape} is not of gpt-oss's form")

    def load(rows: slice) -> np.ndarray:
        """f32[E, outputs, inputs] of these outputs, or f32[E, outputs] of biases."""
        if form != "_blocks":
            values = checkpoint.load(name)
            return (values if form else values.swapaxes(1, 2))[:, rows]
        pairs, exponents = (checkpoint.integers(n)[:, rows].astype(np.uint8) for n in (name, scales))
        codes = np.stack([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-1).reshape(*pairs.shape[:-1], 32)
        low, high = np.split(codes, 2, axis=-1)  # GGUF has columns j and 16 + j in a byte
        blocks = np.concatenate([exponents[..., None], low | high << np.uint8(4)], axis=-1)
        return quants.dequantize(blocks.reshape(*blocks.shape[:2], -1), GGMLQuantizationType.MXFP4)

    experts, outputs, inputs = shape[0], shape[1], ()
    if not form:
        outputs, inputs = shape[2], shape[1:2]
    elif form == "_blocks":
        inputs = (shape[2] * 32,)
    parts = {"down": slice(None)} if matrix == "down" else {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    for part, rows in parts.items():
        target = f"blk.{int(layer)}.ffn_{part}_exps.{'bias' if form == '_bias' else 'weight'}"
        yield target, (experts, outputs // len(parts), *inputs), partial(load, rows)
