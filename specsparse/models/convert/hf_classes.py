"""What classes of transformers mean by config.json and by their tensors, where their architecture leaves it open."""

from collections.abc import Mapping
from dataclasses import dataclass

from specsparse.engine.architectures import ARCHITECTURES, Architecture
from specsparse.support.json_files import Json


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
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}
"""The class that a config.json without `architectures` is of, by its `model_type`."""


def class_name(config: Json) -> str | None:
    """The class of transformers that a config.json is of, known here or not; None if it names none."""
    names, model_type = config.get("architectures"), config.get("model_type")
    if isinstance(names, list) and names:
        return names[0] if isinstance(names[0], str) else None
    return _MODEL_TYPES.get(model_type, model_type) if isinstance(model_type, str) else None


@dataclass(frozen=True)
class TextPart:
    """The text model in a checkpoint of a model that sees images too.

    Attributes:
        of: the text model's own class, of `CLASSES`.
        defaults: values that its `text_config` may leave out, those of transformers.
        left_out: what the tensors of other parts begin with.
    """

    of: str
    defaults: Mapping[str, object]
    left_out: tuple[str, ...]

    def own_name(self, tensor: str) -> str | None:
        """What a tensor is called where its part stands alone; None where it is of another part."""
        if tensor.removeprefix("model.").startswith(self.left_out):
            return None
        old = next((prefix for prefix in _OF_TEXT if tensor.startswith(prefix)), "")
        return _OF_TEXT.get(old, "") + tensor.removeprefix(old)


_OF_TEXT = {"model.language_model.": "model.", "language_model.": ""}
"""What tensors of a text part begin with in files of newer releases of transformers, and in those on the Hub."""

TEXT_PARTS: Mapping[str, TextPart] = {
    "Gemma3ForConditionalGeneration": TextPart(
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        ("vision_tower.", "multi_modal_projector."),
    ),
}  # fmt: skip
"""Classes of transformers that hold a text model among other parts."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of transformers, and ours."""
