"""What a file is for, once it loads: tokenizer, weights and a few tokens, at the cost of few compilations."""

import jax
import numpy as np

from specsparse import api, kernels
from specsparse.engine import llama, weights
from specsparse.engine.config import ModelConfig
from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.model import Model
from specsparse.engine.text.tokenizer import Tokenizer


class Runner:
    """Runs open files; the `then` of `load_everything`. Files of one config and layout share their programs.

    Attributes:
        models: by config and structure of the weights.
        ran: files that generated their tokens.
    """

    def __init__(self, tokens: int = 4):
        self.tokens = tokens
        self.models: dict = {}
        self.ran = 0

    def __call__(self, f: GGUFFile, config: ModelConfig) -> None:
        """Encodes a text and generates after it; a file without a tokenizer gives the logits of a few ids.

        Raises:
            UserError: tokenizer or weights are damaged, or the model's numbers are none.
        """
        has_tokenizer = any(key.startswith("tokenizer.") for key in f.metadata)
        tokenizer = Tokenizer.from_metadata(f.metadata, where=str(f.path)) if has_tokenizer else None
        model = self._model(f, config)
        model.tokenizer = tokenizer
        if tokenizer is None:
            model.logits(np.arange(min(self.tokens, config.vocab_size, config.context_length)))
        else:
            tokenizer.decode(tokenizer.encode("hello, w\u00f6rld", add_special=True, parse_special=True))
            prompt = [config.vocab_size - 1, *range(min(3, config.vocab_size))][-config.context_length :]
            api.generate(model, prompt, max_tokens=self.tokens, ignore_eos=True)
        self.ran += 1

    def _model(self, f: GGUFFile, config: ModelConfig) -> Model:
        """The model of these shapes with this file's weights."""
        chosen = kernels.get()
        params = weights.load_params(f, config, floats=chosen.name != "native")
        key = (config, jax.tree.structure(params))
        if key not in self.models:
            self.models[key] = Model(
                config=config,
                tokenizer=None,
                params=params,
                forward=llama.make_forward(config, chosen),
                kernels=chosen,
                kv_dtype="f16",
                path=f.path,
                footprint=weights.footprint(params, f),
            )
        model = self.models[key]
        model.params, model.path, model.rope_factors = params, f.path, weights.rope_factors(f, config)
        model._tables.clear()
        return model
