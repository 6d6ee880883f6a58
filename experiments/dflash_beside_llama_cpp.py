"""Claim: llama.cpp drafts the same tokens from the GGUF form of a DFlash drafter as the library that trained it.

PYTHON is one that has llama-cpp-python (0.3.36 was tried). io.npz holds input_ids, aux_hidden, aux_layer_ids, anchors
and block_logits as speculators computed them. Python's wrapper has no call for the features of layers, so those are
called by their names in the library.

Expected: NMSE of the target's features and of each block's logits under 1e-11, every drafted token the same; exit code
1 otherwise.
Run time: a second for the drafter of the tests.
Command: python -m specsparse convert dflash tests/data/dflash d.gguf --target tests/data/eagle3/target.gguf
         PYTHON experiments/dflash_beside_llama_cpp.py tests/data/eagle3/target.gguf d.gguf tests/data/dflash/io.npz
"""

import argparse
import ctypes
import sys

import llama_cpp as lib
import numpy as np

MOST = 1e-11
SET_LAYER = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
GET_LAYER = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
QUIET = lib.llama_log_callback(lambda *_: None)


def load(path: str):
    """A model."""
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not model:
        sys.exit(f"{path}: llama.cpp does not load it")
    return model


def key(model, name: str) -> str:
    """A value of the file's metadata."""
    value = ctypes.create_string_buffer(256)
    found = lib.llama_model_meta_val_str(model, name.encode(), value, 256)
    return value.value.decode() if found >= 0 else ""


def context(model, other=None):
    """A context with a cache in float32; a drafter's knows that of its target."""
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, 256, 256
    params.type_k = params.type_v = 0
    params.flash_attn_type = 0
    if other is not None:
        params.ctx_other = other
    return lib.llama_init_from_model(model, params)


def decode(ctx, start: int, *, tokens=None, rows=None) -> None:
    """Decodes tokens, whose logits are kept, or takes rows of features into the cache, from position `start` on."""
    n = len(tokens if rows is None else rows)
    batch = lib.llama_batch_init(n, 0 if rows is None else rows.shape[1], 1)
    batch.n_tokens = n
    for i in range(n):
        batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = start + i, 1, 0, rows is None
        if rows is None:
            batch.token[i] = int(tokens[i])
    if rows is not None:
        ctypes.memmove(batch.embd, np.ascontiguousarray(rows, np.float32).ctypes.data, 4 * rows.size)
    code = lib.llama_decode(ctx, batch)
    lib.llama_batch_free(batch)
    if code:
        sys.exit(f"llama_decode: {code}")


def main() -> int:
    """Prints an error for the features and for each block."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", help="a GGUF file")
    parser.add_argument("drafter", help="a GGUF file")
    parser.add_argument("io", help="what is wanted: io.npz")
    given = parser.parse_args()
    api = lib.llama_cpp._lib
    set_layer, get_layer = getattr(api, SET_LAYER), getattr(api, GET_LAYER)
    set_layer.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool)
    get_layer.argtypes, get_layer.restype = (ctypes.c_void_p, ctypes.c_uint32), ctypes.POINTER(ctypes.c_float)
    lib.llama_log_set(QUIET, None)
    target, drafter = load(given.target), load(given.drafter)
    ours = context(target)
    theirs = context(drafter, ours)
    with np.load(given.io) as found:
        ids, features = found["input_ids"], found["aux_hidden"]
        blocks = list(zip(found["anchors"].tolist(), found["block_logits"], strict=True))
        layers = found["aux_layer_ids"].tolist()
    width = features.shape[1] // len(layers)
    for layer in layers:
        set_layer(ours, layer, True)
    decode(ours, 0, tokens=ids)
    rows = [np.ctypeslib.as_array(get_layer(ours, layer), (len(ids), width)).copy() for layer in layers]
    got = np.concatenate(rows, axis=1)
    far = nmse(got, features)
    print(f"features: NMSE {far:.1e}")
    good = far < MOST
    lib.llama_set_causal_attn(theirs, False)
    mask = int(key(drafter, "tokenizer.ggml.mask_token_id"))
    for anchor, logits in blocks:
        lib.llama_memory_clear(lib.llama_get_memory(theirs), True)
        decode(theirs, 0, rows=got[:anchor])
        decode(theirs, anchor, tokens=[ids[anchor]] + [mask] * (len(logits) - 1))
        block = np.ctypeslib.as_array(lib.llama_get_logits(theirs), logits.shape).copy()
        same = bool((block[1:].argmax(1) == logits[1:].argmax(1)).all())
        far = nmse(block, logits)
        good &= same and far < MOST
        print(f"block behind {anchor} tokens: NMSE {far:.1e}, the same drafts: {same}")
    return 0 if good else 1


def nmse(got: np.ndarray, wanted: np.ndarray) -> float:
    """Mean squared error over the mean square."""
    return float(np.square(got - wanted).sum() / np.square(wanted).sum())


if __name__ == "__main__":
    sys.exit(main())
