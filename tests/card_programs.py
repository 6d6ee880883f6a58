"""The programs of a model for a device that is not there, from shapes alone: nothing is loaded and nothing runs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from specsparse import SamplingParams
from specsparse.engine import cache as kv
from specsparse.engine import generate, llama
from specsparse.engine.config import ModelConfig
from specsparse.engine.fixed_width import fixed_width
from specsparse.engine.generate import DecodeState, Job
from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.params import compile_params
from specsparse.engine.weights import Layer, Params
from specsparse.kernels import Kernels
from specsparse.speculative import loop, token_sources
from specsparse.speculative.drafters.synthetic import Scripted
from specsparse.speculative.trees.template import TreeTemplate
from specsparse.speculative.verifiers import get_verifier

PROMPT = 128
"""Rows of the prompt's program."""


def array(shape, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def params_of(config: ModelConfig, matrix: Callable, capacity: int) -> Params:
    """The weights of a Llama by shape; `matrix(rows, cols)` is one of its matrices."""
    D, heads, groups = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = Layer(
        attn_norm=array([D]), attn_q=matrix(heads, D), attn_k=matrix(groups, D), attn_v=matrix(groups, D),
        attn_output=matrix(D, heads), ffn_norm=array([D]), ffn_gate=matrix(config.d_ff, D),
        ffn_up=matrix(config.d_ff, D), ffn_down=matrix(D, config.d_ff), biases={},
    )  # fmt: skip
    embedding = matrix(config.vocab_size, D)
    table = array([1, capacity, config.rope.dim // 2])
    return Params(
        embedding=embedding,
        layers=(layer,) * config.n_layers,
        output_norm=array([D]),
        output=embedding if config.tied_output else matrix(config.vocab_size, D),
        cos=table,
        sin=table,
    )


def programs(
    config: ModelConfig, params: Params, kernels: Kernels, width: int, *, batch: int = 1
) -> dict[str, tuple[Callable, tuple]]:
    """Function and arguments of plain decoding, verified chains, verified trees (all whole loops), and a prompt piece.

    `width` is that of `engine.fixed_width`; drafts are as long as it holds.
    """
    capacity = params.cos.shape[1]
    forward = fixed_width(llama.make_forward(config, kernels), width)
    cache = jax.eval_shape(
        partial(_cache, config.n_layers, batch, capacity, config.n_kv_heads, config.head_dim),
    )
    probs, sampling_arrays = compile_params(
        SamplingParams(temperature=0.0), vocab_size=config.vocab_size, batch=batch, context_limit=capacity
    )
    whole = array([batch], jnp.int32)
    job = Job(sampling_arrays, array([batch, 1], jnp.int32), whole, array([batch, 2], jnp.uint32), whole)
    samplers = pipeline.kernels_of(kernels)
    tree = TreeTemplate.kary((2, 2)) if width == 8 else TreeTemplate.kary((2, 2, 2))
    rounds = array([], jnp.int32)

    def state(nodes: int) -> DecodeState:
        return DecodeState(
            tokens=array([batch, capacity], jnp.int32), length=whole, finish=whole, cache=cache,
            counters=jax.tree.map(lambda a: array(a.shape, a.dtype), generate.zero_counters(batch, nodes)),
            token_sources=array([batch, capacity], token_sources.DTYPE) if nodes else None,
        )  # fmt: skip

    def speculative(template: TreeTemplate, verifier: str):
        drafter = Scripted(template, (template.size - 1,), config.vocab_size, truth=(1, 2, 3))
        step = loop.make_step(loop.Round(forward, probs, samplers, drafter, get_verifier(verifier)))
        return partial(generate.run, step), ((params, None), job, state(template.size), rounds)

    plain = generate.make_step(forward, probs, samplers)
    return {
        "decode": (partial(generate.run, plain), (params, job, state(0), rounds)),
        "verify": speculative(TreeTemplate.chain(width - 1), "greedy"),
        "tree": speculative(tree, "tree_match"),
        "prompt": (
            partial(generate.prefill_chunk, forward),
            (params, array([batch, PROMPT], jnp.int32), whole, cache),
        ),
    }


def _cache(layers: int, batch: int, capacity: int, groups: int, d: int):
    k = tuple(jnp.zeros((batch, groups, capacity // kv.LANES, d, kv.LANES), jnp.float16) for _ in range(layers))
    v = tuple(jnp.zeros((batch, groups, capacity, d), jnp.float16) for _ in range(layers))
    return kv.KVCache(k, v, jnp.zeros((batch,), jnp.int32))
