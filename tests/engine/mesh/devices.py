"""Split a GGUF as llama.cpp's gguf-split does."""

from pathlib import Path

from gguf import GGUFWriter

from specsparse.engine.gguf.reader import GGUFFile, open_gguf, shard_names
from specsparse.engine.gguf.requantise import add_key


def split(source: Path, folder: Path, *, count: int, **keys: int) -> list[str]:
    """Writes `count` files and returns their names. `keys` replace "count", "no" or "tensors_count" of every shard."""
    f = open_gguf(source)
    names = shard_names(f"{source.stem}-00001-of-{count:05d}.gguf")
    each = -(-len(f.tensors) // count)
    tensors = list(f.tensors.values())
    for i, name in enumerate(names):
        own = {"count": count, "no": i, "tensors_count": len(f.tensors), **keys}
        _write(folder / name, f, tensors[i * each : (i + 1) * each], own, whole=i == 0)
    return names


def _write(path: Path, f: GGUFFile, tensors, own: dict[str, int], *, whole: bool) -> None:
    writer = GGUFWriter(path, f.metadata["general.architecture"])
    for key, value in f.metadata.items() if whole else ():
        if key != "general.architecture":
            add_key(writer, key, value)
    writer.add_uint16("split.count", own["count"])
    writer.add_uint16("split.no", own["no"])
    writer.add_int32("split.tensors.count", own["tensors_count"])
    for t in tensors:
        writer.add_tensor(t.name, t.raw, raw_shape=t.raw.shape, raw_dtype=t.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
