"""Split a GGUF as llama.cpp's gguf-split does."""

from pathlib import Path

import numpy as np

from specsparse.engine.gguf.reader import open_gguf
from specsparse.engine.gguf.shards import shard_names
from specsparse.engine.gguf.writer import NewTensor, write_gguf


def split(source: Path, folder: Path, *, count: int, **keys: int) -> list[str]:
    """Writes `count` files and returns their names. `keys` replace "count", "no" or "tensors_count" of every shard."""
    f = open_gguf(source)
    names = shard_names(f"{source.stem}-00001-of-{count:05d}.gguf")
    each = -(-len(f.tensors) // count)
    tensors = list(f.tensors.values())
    for i, name in enumerate(names):
        own = {"count": count, "no": i, "tensors_count": len(f.tensors), **keys}
        metadata = dict(f.metadata) if i == 0 else {"general.architecture": f.metadata["general.architecture"]}
        metadata |= {"split.count": np.uint16(own["count"]), "split.no": np.uint16(own["no"])}
        metadata["split.tensors.count"] = np.int32(own["tensors_count"])
        write_gguf(folder / name, metadata, [NewTensor.from_file(t) for t in tensors[i * each : (i + 1) * each]])
    return names
