"""FFN layers with planted sparsity: a gate of low rank, pushed below zero by a channel that every residual shares."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import specsparse
from specsparse.kernels.packing.dequant import dequantize, pack_float
from specsparse.testing import write_tiny_gguf
from specsparse.testing.predictor_contract import EPS, RANK, D, F, Planted, plant

__all__ = ["EPS", "D", "F", "Planted", "plant", "planted_model", "scores", "true_neurons"]


def true_neurons(planted: Planted, rows: np.ndarray) -> np.ndarray:
    """float64[N, F]: the neurons' values by numpy."""
    layer, x = planted.layer, rows.astype(np.float64)
    z = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * np.asarray(layer.ffn_norm, np.float64)
    gate, up = (z @ np.asarray(dequantize(m), np.float64).T for m in (layer.ffn_gate, layer.ffn_up))
    return np.maximum(gate, 0) * up if planted.ffn.act == "relu" else gate / (1 + np.exp(-gate)) * up


def scores(keep: np.ndarray, active: np.ndarray) -> tuple[float, float, float]:
    """(recall, precision, kept share)."""
    both = np.sum(active & (keep == 1))
    return both / active.sum(), both / max((keep == 1).sum(), 1), keep.mean()


def planted_model(folder, *, seed: int = 0, **config):
    """A tiny ReLU model whose layers are sparse: its residuals share a channel, and its gates are low beside it."""
    path = write_tiny_gguf(folder / "planted.gguf", tokenizer="spm", seed=seed, n_layers=2, context_length=64, **config)
    model = specsparse.load(path, activation="relu", kv_dtype="f32")
    rng = np.random.default_rng(seed)
    embedding = np.array(dequantize(model.params.embedding))
    embedding[:, 0] = 6.0
    layers = []
    for layer in model.params.layers:
        neurons, width = layer.ffn_gate.shape
        gate = rng.normal(0, 1, (neurons, RANK)) @ rng.normal(0, 1, (RANK, width)) / np.sqrt(width)
        gate[:, 0] = -rng.uniform(0.2, 0.6, neurons)
        layers.append(layer._replace(ffn_gate=pack_float(jnp.asarray(gate / np.asarray(layer.ffn_norm), jnp.float32))))
    params = model.params._replace(embedding=pack_float(jnp.asarray(embedding)), layers=tuple(layers))
    return dataclasses.replace(model, params=params)
