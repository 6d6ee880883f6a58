"""The GGUF reader: agreement with the library's reader, and one clear line for each way a file can be wrong."""

import os
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as T
from hypothesis import given, settings
from hypothesis import strategies as st

import specsparse
from specsparse.engine.gguf.reader import can_dequantise, open_gguf, supported_types
from specsparse.engine.gguf.writer import NewTensor, write_gguf
from specsparse.errors import UserError
from specsparse.testing import random_quantised, write_tiny_gguf

U32, F32, STRING, ARRAY, BOOL = 4, 6, 8, 9, 7


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def entry(name: str, ne: tuple[int, ...], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    dims = struct.pack(f"<I{len(ne)}Q", len(ne) if n_dims is None else n_dims, *ne)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def build(keys=(), entries=(), data=b"", *, version=3, magic=b"GGUF", n_keys=None, n_tensors=None, align=32) -> bytes:
    head = magic + struct.pack(
        "<IQQ", version, len(entries) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    )
    head += b"".join(keys) + b"".join(entries)
    return head + bytes(-len(head) % align) + data


def opened(tmp_path: Path, blob: bytes):
    path = tmp_path / "x.gguf"
    path.write_bytes(blob)
    return open_gguf(path)


def refusal(tmp_path: Path, blob: bytes) -> str:
    with pytest.raises(UserError) as caught:
        opened(tmp_path, blob)
    message = str(caught.value)
    assert "\n" not in message and "x.gguf" in message
    return message


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q4_1", "Q6_K"])
def test_agrees_with_the_library_reader(tmp_path, quant):
    path = write_tiny_gguf(tmp_path / "t.gguf", quant=quant, tokenizer="spm", vocab_size=309)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    fields = {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for name, value in fields.items():
        mine = ours.metadata[name]
        assert type(mine) is np.ndarray or type(mine) is type(value)
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == value
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.type == tensor.tensor_type
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.raw.tobytes() == tensor.data.tobytes()
        assert mine.nbytes == tensor.n_bytes
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(mine.dequantize(), want)
        assert not mine.raw.flags.writeable


def test_version_2_and_alignment(tmp_path):
    align = key("general.alignment", U32, struct.pack("<I", 64))
    weights = np.arange(8, dtype="<f4")
    blob = build([align], [entry("w", (4, 2))], weights.tobytes(), version=2, align=64)
    f = opened(tmp_path, blob)
    assert (f.version, f.alignment, f.magic) == (2, 64, b"GGUF")
    assert np.array_equal(f.tensors["w"].dequantize(), weights.reshape(2, 4))


def test_a_file_without_tensors_may_end_at_its_header(tmp_path):
    blob = build([key("a", BOOL, b"\1")], align=1)
    assert opened(tmp_path, blob).metadata == {"a": True}


def test_typed_access(tmp_path):
    keys = [
        key("int", U32, struct.pack("<I", 3)),
        key("float", F32, struct.pack("<f", 0.5)),
        key("str", STRING, text("x")),
        key("strs", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("")),
        key("nums", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3)),
    ]
    f = opened(tmp_path, build(keys))
    assert (f.get("int", "int"), f.get("int", "float"), f.get("float", "float"), f.get("none", "int", 7)) == (
        3,
        3.0,
        0.5,
        7,
    )
    assert f.get("strs", "strings", None) == ["a", ""] and f.get("none", "strings", None) is None
    assert f.get("nums", "numbers", None).tolist() == [1, 2, 3]
    for call in (
        lambda: f.get("float", "int"),
        lambda: f.get("str", "int"),
        lambda: f.get("strs", "str"),
        lambda: f.get("none", "str"),
        lambda: f.get("nums", "strings", None),
        lambda: f.get("strs", "numbers", None),
    ):
        with pytest.raises(UserError, match="metadata key '"):
            call()


HUGE = 2**60
TENSOR = entry("w", (8,))
DATA = bytes(32)
LONG = struct.pack("<Q", HUGE)

WRONG = {
    "a wrong magic": (build(magic=b"GGML"), "not a GGUF file.*b'GGML'"),
    "version 1": (build(version=1), "version 1; versions 2 and 3"),
    "version 4": (build(version=4), "version 4"),
    "version 0": (build(version=0), "version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "too many tensors": (build(n_tensors=HUGE), f"number of tensors is {HUGE}"),
    "too many keys": (build(n_keys=HUGE), f"number of metadata keys is {HUGE}"),
    "more keys than there are": (
        build(n_keys=2, keys=[key("a", BOOL, b"\1")], align=64),
        "name of metadata key 1 is empty",
    ),
    "a long key": (build([LONG + b"abc"]), "length of the name of metadata key 0 is"),
    "a long string": (build([text("a") + struct.pack("<I", STRING) + LONG]), "length of metadata key 'a' is"),
    "a long array": (build([key("a", ARRAY, struct.pack("<I", U32) + LONG)]), "length of metadata key 'a' is"),
    "a long array of strings": (
        build([key("a", ARRAY, struct.pack("<I", STRING) + LONG)]),
        "length of metadata key 'a'",
    ),
    "a long string in an array": (
        build([key("a", ARRAY, struct.pack("<IQ", STRING, 1) + LONG)]),
        "string 0 of metadata key 'a'",
    ),
    "an array of arrays": (build([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(32))]), "array of arrays"),
    "an unknown value type": (build([key("a", 13, bytes(8))]), "unknown value type 13"),
    "an unknown item type": (build([key("a", ARRAY, struct.pack("<IQ", 77, 1))]), "unknown value type 77"),
    "a key twice": (build([key("a", BOOL, b"\1")] * 2), "'a' is there twice"),
    "a key that is not UTF-8": (build([key(b"\xff\xfe", BOOL, b"\1")]), "not valid UTF-8"),
    "a value that is not UTF-8": (build([key("a", STRING, text(b"\xff"))]), "'a' at offset.*not valid UTF-8"),
    "an item that is not UTF-8": (
        build([key("a", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xc3"))]),
        "string 0 of metadata key 'a'.*UTF-8",
    ),
    "no dimensions": (build([], [entry("w", (), n_dims=0)], DATA), "0 dimensions"),
    "five dimensions": (build([], [entry("w", (1,) * 5)], DATA), "5 dimensions"),
    "2^31 dimensions": (build([], [entry("w", (8,), n_dims=2**31)], DATA), "2147483648 dimensions"),
    "an empty shape": (build([], [entry("w", (0, 4))], DATA), r"empty shape \(4, 0\)"),
    "a huge empty shape": (build([], [entry("w", (0, 2**63))], DATA, magic=b"PWRI"), r"empty shape \(9223372036"),
    "a shape past the file": (build([], [entry("w", (HUGE, HUGE))], DATA), "past the end of the file"),
    "a product that wraps to 0": (build([], [entry("w", (2**32, 2**32))], DATA), "past the end of the file"),
    "a row that is no whole block": (
        build([], [entry("w", (33,), kind=T.Q4_0)], DATA),
        "rows of 33.*Q4_0's block of 32",
    ),
    "an unknown tensor type": (build([], [entry("w", (8,), kind=99)], DATA), "'w' has unknown type 99; known are F32"),
    "a removed tensor type": (build([], [entry("w", (8,), kind=4)], DATA), "unknown type 4;"),
    "an offset past the end": (build([], [entry("w", (8,), offset=HUGE)], DATA), "past the end of the file"),
    "an offset off by one block": (build([], [entry("w", (8,), offset=32)], DATA), "past the end of the file"),
    "a misaligned offset": (build([], [entry("w", (8,), offset=8)], DATA * 2), "multiple of the alignment 32"),
    "a tensor twice": (build([], [TENSOR, entry("w", (8,), offset=32)], DATA * 2), "tensor 'w' is there twice"),
    "tensors that overlap": (build([], [TENSOR, entry("v", (8,))], DATA), "'v' overlaps tensor 'w'"),
    "an alignment of 0": (
        build([key("general.alignment", U32, struct.pack("<I", 0))], [TENSOR], DATA),
        "general.alignment is 0",
    ),
    "an alignment of 24": (
        build([key("general.alignment", U32, struct.pack("<I", 24))], [TENSOR], DATA),
        "general.alignment is 24",
    ),
    "an alignment in words": (
        build([key("general.alignment", STRING, text("much"))], [TENSOR], DATA),
        "general.alignment is 'much'",
    ),
    "no data": (build([], [TENSOR]), "past the end of the file"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, what):
    blob, says = WRONG[what]
    message = refusal(tmp_path, blob)
    assert re.search(says, message), message


def test_too_many_real_entries_are_refused(tmp_path):
    n = (1 << 17) + 1
    assert "at most 131072" in refusal(tmp_path, build(n_keys=n, data=bytes(14 * n)))


@pytest.mark.parametrize("n_dims", [1, 2, 4])
def test_odd_shapes_load(tmp_path, n_dims):
    ne = (2,) * n_dims
    values = np.arange(2**n_dims, dtype="<f4")
    f = opened(tmp_path, build([], [entry("w", ne)], values.tobytes()))
    assert np.array_equal(f.tensors["w"].dequantize(), values.reshape(ne))


def test_names_cannot_break_the_line(tmp_path):
    assert r"'a\nb'" in refusal(tmp_path, build([], [entry("a\nb", (8,), kind=99)], DATA))
    assert len(refusal(tmp_path, build([], [entry("x" * 5000, (0,))], DATA))) < 300


def test_every_cut_is_refused(tmp_path):
    """Cut at any byte of the header, and at a sample of the data, a file is refused and says so."""
    keys = [
        key("general.architecture", STRING, text("llama")),
        key("strs", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc")),
        key("nums", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3)),
    ]
    blob = build(keys, [entry("w", (8, 2)), entry("v", (32,), kind=T.Q8_0, offset=64)], bytes(64 + 34))
    opened(tmp_path, blob)
    for n in range(len(blob)):
        refusal(tmp_path, blob[:n])


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_after_the_magic_never_crash(tmp_path_factory, junk):
    path = tmp_path_factory.mktemp("junk") / "x.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + junk)
    try:
        open_gguf(path)
    except UserError as error:
        assert "\n" not in str(error)


def test_paths_that_are_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "file").write_bytes(b"x")
    for path, says in [
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "empty", "is empty"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "file" / "x", "cannot be read: Not a directory"),
        (Path("a\0b"), "cannot be read"),
        (Path("/dev/null"), "not a regular file"),
        (tmp_path / ("x" * 5000), "cannot be read"),
    ]:
        with pytest.raises(UserError, match=says):
            open_gguf(path)


def test_types_without_weights(tmp_path):
    assert T.Q4_K in supported_types() and T.I32 not in supported_types() and not can_dequantise(T.Q8_K)
    f = opened(tmp_path, build([], [entry("w", (8,), kind=T.I32)], DATA))
    with pytest.raises(UserError, match="'w' of type I32 holds no weights"):
        f.tensors["w"].dequantize()


def test_a_type_that_a_newer_gguf_dequantises_loads(tmp_path, monkeypatch):
    """Q1_0, a sign a weight and a scale for 128, as if this gguf could read it: its values are held as float32."""

    def dequantize(data):
        blocks = data.reshape(-1, 18)
        d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), d, -d).reshape(len(data), -1)

    sizes = {"d_model": 128, "d_ff": 128, "n_layers": 1, "n_heads": 4, "n_kv_heads": 4}
    plain = open_gguf(write_tiny_gguf(tmp_path / "plain.gguf", **sizes))
    new, floats, rng = [], [], np.random.default_rng(0)
    for t in plain.tensors.values():
        if len(t.shape) == 1:
            new, floats = [*new, NewTensor.from_file(t)], [*floats, NewTensor.from_file(t)]
            continue
        raw = rng.integers(0, 60, (t.shape[0], t.shape[1] // 128 * 18), np.uint8)
        new.append(NewTensor(t.name, T.Q1_0, t.shape, lambda raw=raw: raw))
        floats.append(NewTensor.from_values(t.name, dequantize(raw), T.F32))
    paths = [write_gguf(tmp_path / f"{i}.gguf", plain.metadata, tensors) for i, tensors in enumerate((new, floats))]
    with pytest.raises(UserError, match="has type Q1_0; supported are F32"):
        specsparse.load(paths[0])
    monkeypatch.setitem(gguf.quants._type_traits, T.Q1_0, SimpleNamespace(dequantize=dequantize))
    can_dequantise.cache_clear()
    try:
        ours, wanted = (specsparse.load(path).params for path in paths)
    finally:
        can_dequantise.cache_clear()
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (ours, wanted)))
    assert ours.embedding.layout.source == "Q1_0"


@pytest.mark.parametrize("kind", supported_types(), ids=lambda kind: kind.name)
def test_random_quantised_is_valid(kind):
    raw = random_quantised(kind, 8, 512, seed=3, std=0.05)
    assert raw.dtype == np.uint8 and raw.shape[0] == 8
    assert np.array_equal(raw, random_quantised(kind.name, 8, 512, seed=3, std=0.05))
    assert not np.array_equal(raw, random_quantised(kind, 8, 512, seed=4, std=0.05))
    values = gguf.quants.dequantize(raw, kind)
    assert values.shape == (8, 512) and np.isfinite(values).all()
    assert 0.02 < values.std() < 0.12 and abs(values.mean()) < 0.02
