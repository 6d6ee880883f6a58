"""llama2.c's files: logits and ids of the converted model, and every way they can be wrong."""

import struct

import pytest

import specsparse
from specsparse.engine.rope import interleaved
from specsparse.errors import UserError
from specsparse.models.convert.llama2c import convert_llama2c
from specsparse.testing.tiny import spm_vocabulary
from tests.models.convert import checkpoints
from tests.tolerances import FORWARD_NMSE, nmse

CONFIG = {**checkpoints.CONFIG, "vocab_size": 309, "max_position_embeddings": 64}
ORDER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def model_bin(w, *, shared):
    """The bytes of model.bin; queries and keys for a rotation of neighbours, as llama2.c has it."""
    c, layers = CONFIG, range(CONFIG["num_hidden_layers"])
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    vocab = c["vocab_size"] if shared else -c["vocab_size"]
    out = struct.pack("<7i", *(c[name] for name in names), vocab, c["max_position_embeddings"])
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}

    def put(name):
        value = w[f"{name}.weight"]
        short = name.partition("layers.")[2].partition(".")[2]
        return (interleaved(value, heads[short]) if short in heads else value).tobytes()

    out += put("model.embed_tokens")
    for part in (
        "input_layernorm",
        *ORDER,
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.down_proj",
        "mlp.up_proj",
    ):
        out += b"".join(put(f"model.layers.{i}.{part}") for i in layers)
    out += put("model.norm") + bytes(2 * 64 * 8 * 4)  # cos and sin of 64 positions and 8 pairs
    return out if shared else out + put("lm_head")


def tokenizer_bin():
    tokens, _, scores = spm_vocabulary(309)
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", *tokens[3:]]
    rows = [text.replace("\u2581", " ").encode() for text in texts]
    out = struct.pack("<i", max(map(len, rows)))
    return out + b"".join(struct.pack("<fi", s, len(r)) + r for s, r in zip(scores, rows, strict=True))


@pytest.fixture
def files(tmp_path):
    w = checkpoints.weights(CONFIG)
    (tmp_path / "model.bin").write_bytes(model_bin(w, shared=False))
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin())
    return tmp_path, w


@pytest.mark.parametrize("shared", [True, False])
def test_logits_and_ids(files, shared):
    folder, w = files
    if shared:
        w.pop("lm_head.weight")
        (folder / "model.bin").write_bytes(model_bin(w, shared=True))
    found = convert_llama2c(folder / "model.bin", folder / "tokenizer.bin", folder / "out.gguf")
    model = specsparse.load(folder / "out.gguf", kv_dtype="f32")
    assert found == model.config and found.tied_output == shared and found.context_length == 64
    ids = model.tokenizer.encode("hello the world, and\n", add_special=True)
    tokens = [model.tokenizer.token_text(i) for i in ids]
    assert tokens[:4] == ["<s>", "\u2581hello", "\u2581the", "\u2581world"] and tokens[-1] == "<0x0A>"
    assert nmse(model.logits(ids), checkpoints.logits(CONFIG, w, ids)) <= FORWARD_NMSE["f32"]


def refused(folder, model="model.bin"):
    with pytest.raises(UserError) as caught:
        convert_llama2c(folder / model, folder / "tokenizer.bin", folder / "out.gguf")
    assert "\n" not in str(caught.value) and not (folder / "out.gguf").exists()
    return str(caught.value)


def test_mistakes(files):
    folder, _ = files
    whole, tokens = (folder / "model.bin").read_bytes(), (folder / "tokenizer.bin").read_bytes()
    (folder / "tokenizer.bin").write_bytes(tokens[:500])
    assert "is no tokenizer.bin of 309 tokens" in refused(folder)
    (folder / "tokenizer.bin").write_bytes(tokens[:4] + struct.pack("<fi", 0.0, 2) + b"\xff\xfe" + tokens[12:])
    assert "token 0: 'utf-8' codec" in refused(folder)
    cases = {
        whole[:-4]: f"its header asks for {len(whole)}",
        whole + b"1234": f"has {len(whole) + 4} bytes, and its header asks for {len(whole)}",
        whole[:12]: "has 12 bytes",
        struct.pack("<I", 0x616B3432) + whole[4:]: "later version of the format",
        b"GGUF" + whole[4:]: "is no model of llama2.c",
        whole[:12] + struct.pack("<i", 0) + whole[16:]: "is no model of llama2.c",
    }
    for data, says in cases.items():
        (folder / "model.bin").write_bytes(data)
        assert says in refused(folder)
    assert "cannot be read: No such file" in refused(folder, "none.bin")
