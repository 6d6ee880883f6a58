"""What classes of transformers mean by config.json and by their tensors, where their architecture leaves it open."""

from collections.abc import Mapping
from dataclasses import dataclass

from specsparse.engine.architectures import ARCHITECTURES, Architecture


@dataclass(frozen=True)
class HfClass:
    """One class.

    Attributes:
        architecture: what GGUF files call it.
        tied: whether the output matrix is the embedding, where config.json does not say it.
        rope_base: theta, where it does not say it.
        activation_key: of config.json.
        windowed: whether `sliding_window` of config.json counts without `use_sliding_window`; Llama's class ignores it.
        norms_from_one: norms are stored as what they differ from one.
    """

    architecture: str
    tied: bool = False
    rope_base: float = 10000.0
    activation_key: str = "hidden_act"
    windowed: bool = False
    norms_from_one: bool = False

    @property
    def family(self) -> Architecture:
        """What the architecture is."""
        return ARCHITECTURES[self.architecture]


CLASSES: Mapping[str, HfClass] = {
    "LlamaForCausalLM": HfClass("llama"),
    "MistralForCausalLM": HfClass("llama", windowed=True),
    "Qwen2ForCausalLM": HfClass("qwen2"),
    "Qwen3ForCausalLM": HfClass("qwen3"),
    "SmolLM3ForCausalLM": HfClass("smollm3", tied=True, rope_base=2e6),
    "Gemma3ForCausalLM": HfClass(
        "gemma3", tied=True, rope_base=1e6, activation_key="hidden_activation", windowed=True, norms_from_one=True
    ),
}
"""Classes of transformers by name."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of transformers, and ours."""
