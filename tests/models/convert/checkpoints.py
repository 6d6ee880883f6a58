"""Tiny random checkpoints as transformers writes them, and what their logits are, in float64."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import sentencepiece
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from specsparse.testing.tiny import CHATML, bpe_vocabulary

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "vocab_size": 300,
}  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

_ONE = {"num_hidden_layers": 1, "pad_token_id": 0}

FAMILIES = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5},
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 5, "pad_token_id": 0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32,
        "sliding_window": 6, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", **_ONE, "embedding_multiplier": 6.0,
        "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 3.0,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", **_ONE},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **_ONE, "sliding_window": 7},
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_ONE, "head_dim": 32, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", **_ONE, "num_experts": 6,
        "num_experts_per_tok": 2, "intermediate_size": 32,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 6,
        "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 6, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
            "beta_slow": 1.0, "rope_theta": 150000.0, "truncate": False,
        },
    },
}  # fmt: skip
"""What configs of architectures beside Llama have in place of, and beside, `CONFIG`'s."""
MULTIMODAL = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": 2,
    "text_config": {
        **{k: v for k, v in CONFIG.items() if k not in ("architectures", "hidden_act", "tie_word_embeddings")},
        **{k: v for k, v in FAMILIES["gemma3"].items() if k not in ("architectures", "hidden_activation")},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip
"""config.json of a model that sees images: its text part leaves out what has a usual value."""
_FEED_FORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def weights(config: dict[str, Any], *, seed: int = 0, bias: bool = False) -> dict[str, np.ndarray]:
    """Random float32 tensors under the names of transformers."""
    rng, d, f = np.random.default_rng(seed), config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", d // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    shapes |= {"self_attn.o_proj": (d, q), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    kind, experts = config.get("model_type"), config.get("num_experts", config.get("num_local_experts", 0))
    gemma, normed = kind == "gemma3_text", kind in ("gemma3_text", "qwen3", "qwen3_moe", "olmoe", "olmo2")
    bias |= kind == "gpt_oss"
    if kind == "phi3":
        shapes = {"self_attn.qkv_proj": (q + 2 * kv, d), "self_attn.o_proj": (d, q), "mlp.gate_up_proj": (2 * f, d)}
        shapes |= {"mlp.down_proj": (d, f)}
    if experts:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mlp")}
    one = 0 if gemma else 1  # its norms are stored as what they differ from one
    out = {"model.embed_tokens.weight": rng.normal(0, 1, (config["vocab_size"], d))}
    for i in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            out[f"model.layers.{i}.{name}.weight"] = rng.normal(0, shape[1] ** -0.5, shape)
            if bias and name[-6:] in ("q_proj", "k_proj", "v_proj", *(["o_proj"] if experts else [])):
                out[f"model.layers.{i}.{name}.bias"] = rng.normal(0, 0.3, shape[0])
        norms = ["input_layernorm", "post_attention_layernorm", *(_FEED_FORWARD_NORMS if gemma else ())]
        for name in (norms[1], _FEED_FORWARD_NORMS[1]) if kind == "olmo2" else norms:
            out[f"model.layers.{i}.{name}.weight"] = rng.normal(one, 0.1, d)
        for name in ("q_norm", "k_norm") if normed else ():
            width = {"q_norm": q, "k_norm": kv}[name] if kind in ("olmoe", "olmo2") else head
            out[f"model.layers.{i}.self_attn.{name}.weight"] = rng.normal(one, 0.1, width)
        if experts:
            out |= _experts(rng, config, experts, f"model.layers.{i}.")
        out[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(head // 2)  # old checkpoints have it
    out["model.norm.weight"] = rng.normal(one, 0.1, d)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = rng.normal(0, d**-0.5, (config["vocab_size"], d))
    return {name: value.astype(np.float32) for name, value in out.items()}


def _experts(rng, config: dict[str, Any], count: int, at: str) -> dict[str, np.ndarray]:
    """A layer's router and experts; gpt-oss has them in a form of its own, and sinks."""
    d, f = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    if config["model_type"] != "gpt_oss":
        shapes = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        return {f"{at}mlp.gate.weight": rng.normal(0, d**-0.5, (count, d))} | {
            f"{at}mlp.experts.{e}.{name}.weight": rng.normal(0, shape[1] ** -0.5, shape)
            for e in range(count)
            for name, shape in shapes.items()
        }
    return {
        f"{at}mlp.router.weight": rng.normal(0, d**-0.5, (count, d)),
        f"{at}mlp.router.bias": rng.normal(0, 0.3, count),
        f"{at}mlp.experts.gate_up_proj": rng.normal(0, 2 * d**-0.5, (count, d, 2 * f)),
        f"{at}mlp.experts.gate_up_proj_bias": rng.normal(0, 2, (count, 2 * f)),
        f"{at}mlp.experts.down_proj": rng.normal(0, f**-0.5, (count, f, d)),
        f"{at}mlp.experts.down_proj_bias": rng.normal(0, 0.3, (count, d)),
        f"{at}self_attn.sinks": rng.normal(0, 1, config["num_attention_heads"]),
    }


def multimodal_weights(prefix: str = "language_model.model.", *, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of `MULTIMODAL`: those of its text part begin with `prefix`, and a few that see images."""
    text = weights({**CONFIG, **FAMILIES["gemma3"]}, seed=seed)
    named = {prefix + name.removeprefix("model."): value for name, value in text.items()}
    above = "model." if prefix.startswith("model.") else ""
    named[f"{above}vision_tower.vision_model.post_layernorm.weight"] = np.ones(32, np.float32)
    named[f"{above}multi_modal_projector.mm_soft_emb_norm.weight"] = np.zeros(32, np.float32)
    return named


def logits(
    config: dict[str, Any], w: dict[str, np.ndarray], ids: list[int], inv_freq=None, magnitude=1.0
) -> np.ndarray:
    """float64[n, V] of transformers' Llama: rotation of halves (times `magnitude`), causal attention, SwiGLU."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", config["hidden_size"] // heads)
    if inv_freq is None:
        inv_freq = config["rope_theta"] ** (-np.arange(0, head, 2) / head)
    angle = np.concatenate([np.arange(len(ids))[:, None] * inv_freq] * 2, 1)[:, None]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def turned(x):
        low, high = np.split(x, 2, -1)
        return magnitude * (x * np.cos(angle) + np.concatenate([-high, low], -1) * np.sin(angle))

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        z = norm(x, at + "input_layernorm.weight")
        q = turned(linear(z, at + "self_attn.q_proj").reshape(len(ids), heads, head))
        k = turned(linear(z, at + "self_attn.k_proj").reshape(len(ids), groups, head)).repeat(heads // groups, 1)
        v = linear(z, at + "self_attn.v_proj").reshape(len(ids), groups, head).repeat(heads // groups, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head)
        scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", probs / probs.sum(-1, keepdims=True), v).reshape(len(ids), -1)
        x = x + linear(mixed, at + "self_attn.o_proj")
        z = norm(x, at + "post_attention_layernorm.weight")
        gate = linear(z, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(z, at + "mlp.up_proj"), at + "mlp.down_proj")
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def save(folder: Path, config: dict[str, Any], w: dict[str, np.ndarray], *, bf16: bool = False, parts: int = 1) -> Path:
    """config.json and safetensors, in several files where `parts` says so."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    w = {name: value.astype(ml_dtypes.bfloat16) if bf16 else value for name, value in w.items()}
    if parts == 1:
        save_file(w, folder / "model.safetensors")
        return folder
    names, home = sorted(w), {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        own = {name: w[name] for name in names[i::parts]}
        save_file(own, folder / file)
        home |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    return folder


def bpe_tokenizer(folder: Path, pre: str = "smollm") -> Tokenizer:
    """tokenizer.json of a byte-level BPE, with two special tokens of its own and a chat template."""
    tokens, _, merges = bpe_vocabulary(296)
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "llama-bpe")
    before = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
        "unknown": [pre_tokenizers.Split("l", "isolated")],
    }[pre]
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in tokens[:3]])
    made.add_special_tokens([AddedToken("<|begin|>", special=True)])
    if pre == "llama-bpe":
        made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 296)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def spm_tokenizer(folder: Path) -> sentencepiece.SentencePieceProcessor:
    """tokenizer.model with byte fallback, as Llama 2 has it, and one token added to it."""
    text = ["hello world and the other one", "it is what it is", "a b c d e f g h i j k l m n o p q r s t u v w x y z"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 5), model_prefix=str(folder / "tokenizer"), vocab_size=290, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=3, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=True,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def spm_as_json(folder: Path, sp: sentencepiece.SentencePieceProcessor) -> None:
    """tokenizer.json in place of tokenizer.model, as transformers writes Llama 2's."""
    from tokenizers import normalizers

    pieces = [sp.id_to_piece(i) for i in range(sp.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in sorted((p for p in pieces[259:] if len(p) > 1), key=lambda p: -sp.get_score(vocab[p])):
        parts = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
        merges += sorted(parts, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens(["<pad>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.model").unlink()
