"""At which temperature a head draws where nobody says: who asks gets it, and it is the one that the target accepts most
of, on texts that SmolLM2-135M wrote at temperature 0.8."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsparse.engine.sampling.params import SamplingParams
from specsparse.kernels.packing.dequant import dequantize
from specsparse.runtime.method import MethodSpec, resolve
from specsparse.speculative.base import DraftKind
from specsparse.speculative.drafters import DRAWS_COLDER, draw_temperature, get_drafter
from specsparse.speculative.drafters.heads.head import find, read_head
from specsparse.speculative.drafters.model_drafter import ModelDrafter
from specsparse.support.registry import Choice
from specsparse.training.corpus import Features, Text, fill
from specsparse.training.eagle_form import HeadForm
from specsparse.training.trainer import Trainer, TrainOptions

WARM, ROWS, SHORT = 0.8, 320, 180
TEXTS = json.loads((Path(__file__).parents[1] / "data" / "rounds_smollm2.json").read_text())


@pytest.mark.parametrize("name", ["head", "lookup_head"])
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_head_draws_for_verifiers_that_weigh_draws(name, verifier):
    warm = SamplingParams(temperature=WARM)
    assert resolve(MethodSpec(name, verifier, sampling=warm)).drafter.drafting.temperature == DRAWS_COLDER * WARM
    own = Choice(name, {"temperature": 0.3})
    assert resolve(MethodSpec(own, verifier, sampling=warm)).drafter.drafting.temperature == 0.3
    for other in ("match", None):
        assert resolve(MethodSpec(name, other, sampling=warm)).drafter.kind is DraftKind.ONE_HOT
    assert draw_temperature("match", WARM) is draw_temperature(verifier, 0.0) is None
    model = get_drafter("model", model="smollm2-draft", temperature=0.5)
    assert resolve(MethodSpec(model, verifier, sampling=warm)).drafter is model


def probs(model, texts):
    """At places of answers: p float[r, N] of the head's ids, and the head's logits float[r, N]."""
    form = HeadForm(model, (), read_head(find(None, model.params.output_norm), model.config, floats=True))
    ids = form.ids([], 0)
    weights, frozen = form.first([]), Trainer(model, TrainOptions(rows=ROWS, drafting=ROWS), form).frozen(ids)
    logits = jax.jit(lambda window: form.logits(weights, frozen, model.params.embedding, window, 1)[0])
    output, p, q = np.asarray(dequantize(model.params.output)), [], []

    def target(rows_RD):
        unit_RD = rows_RD / np.sqrt((rows_RD**2).mean(axis=1, keepdims=True) + model.config.norm_eps)
        scores_RV = (unit_RD * np.asarray(model.params.output_norm)) @ output.T / WARM
        p_RV = np.exp(scores_RV - scores_RV.max(axis=1, keepdims=True))
        return (p_RV / p_RV.sum(axis=1, keepdims=True))[:, ids]

    for text in Features(model, form.layers).of(texts):
        window = fill([text], rows=ROWS, drafting=ROWS, width=model.config.d_model)
        places = np.flatnonzero(window.depth >= 0)[2:98:4]
        p.append(target(window.after[places]))
        q.append(np.asarray(logits(jax.tree.map(jnp.asarray, window)))[places])
    return np.concatenate(p), np.concatenate(q)


@pytest.mark.slow  # a figure of the shipped head; what asks for it is below and above
def test_three_quarters_of_the_target_s_temperature_are_accepted_most(smollm2):
    """By 0.01 of the tokens more than at its own temperature, and by 0.05 more than the likeliest token."""
    chosen = [t for t in TEXTS if t["temperature"] == WARM and len(t["prompt_ids"]) < SHORT]
    texts = [Text(np.array(t["prompt_ids"] + t["text_ids"], np.int32), len(t["prompt_ids"])) for t in chosen]
    p_RN, logits_RN = probs(smollm2, texts)
    assert len(p_RN) > 150

    def accepted(temperature):
        q_RN = np.exp((logits_RN - logits_RN.max(axis=1, keepdims=True)) / temperature)
        return float(np.minimum(p_RN, q_RN / q_RN.sum(axis=1, keepdims=True)).sum(axis=1).mean())

    best = accepted(DRAWS_COLDER * WARM)
    likeliest = float(p_RN[np.arange(len(p_RN)), logits_RN.argmax(axis=1)].mean())
    assert best > accepted(WARM) + 0.01 and best > accepted(0.4 * WARM) and best > likeliest + 0.05, (best, likeliest)


def test_generate_draws_too(smollm2):
    made = resolve(MethodSpec("head", "token", sampling=SamplingParams(temperature=WARM)), smollm2).drafter
    assert made is not None and made.kind is DraftKind.SAMPLED
    inner = getattr(made, "drafter", made)
    assert isinstance(inner, ModelDrafter) and inner.sampling.sampling.temperature == pytest.approx(0.6)
