"""Random weights of a bench: how many copies of them one program goes through, and whether memory has room."""

from gguf import GGMLQuantizationType as GGML

from specsparse.kernels.packing.pack import pack_qtensor
from specsparse.kernels.packing.random_blocks import random_quantised
from specsparse.support.files import need_memory

_FEWEST = 16
_COPY_BYTES = 1800
"""A copy costs a hundredth of a second or more to compile, so there is one for so many bytes of each: 1 GiB in copies
of 1.4 MB or more is reached. Smaller ones stay in a cache in part, whatever their number."""
_SAMPLE = 16, 256
"""Rows and columns that every type packs, in whole groups and blocks."""
MADE_BYTES, BLOCK_MADE_BYTES = 12, 4
"""Most bytes a weight while it is made: as a float64 and its float32; as codes, whose scales alone are floats."""
_ADVICE = "give a smaller shape, for instance 4096x11008"


def bounded(total: int, each: int) -> int:
    """Copies of `each` bytes that make up `total`, or as many as compile in seconds."""
    return max(1, min(-(-total // each), max(_FEWEST, each // _COPY_BYTES)))


def need_room(option: str, rows: int, cols: int, kind: str, nbytes: int) -> None:
    """UserError where the memory that is available does not hold `nbytes` for a shape that `option` gave."""
    need_memory(f"{option} {rows}x{cols} in {kind}", nbytes, _ADVICE)


def packed_bytes(kind: str, rows: int, cols: int) -> int:
    """Of a matrix of a GGUF type as the kernels read it, about; nothing of its size is made."""
    made = pack_qtensor(random_quantised(kind, *_SAMPLE, std=0.02, edges=False), GGML[kind], _SAMPLE)
    group, block = _SAMPLE
    return made.nbytes * -(-rows // group) * -(-cols // block)
