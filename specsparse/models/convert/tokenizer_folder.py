"""The tokenizer of a GGUF file as a folder that transformers and load generators read."""

from pathlib import Path

from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.models.convert.hf_tokenizer import PROBE
from specsparse.support.json_files import Json, to_json, write_atomically

NAMES = ("tokenizer.json", "tokenizer_config.json")
_SPECIAL = {"bos": "bos_id", "eos": "eos_id", "unk": "unknown_id"}


def write_tokenizer(file: GGUFFile, folder: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json, which holds the chat template.

    Args:
        file: the model.
        folder: made if need be; files of these names in it are replaced.

    Raises:
        UserError: a tokenizer that tokenizer.json cannot say, or the folder cannot be written.
    """
    tokenizer = Tokenizer.from_metadata(file.metadata, where=str(file.path))
    library = tokenizer.library()
    for text in (PROBE, PROBE.swapcase().replace(" ", "  ")):
        theirs, ours = library.encode(text).ids, tokenizer.encode(text, add_special=True, parse_special=True)
        if theirs != ours:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            raise UserError(
                f"{file.path}: its tokenizer works in a way that tokenizer.json cannot say: token {at} of a test text "
                f"would be {theirs[at : at + 1]} and not {ours[at : at + 1]}"
            )
    write_atomically(folder / NAMES[0], library.to_str())
    write_atomically(folder / NAMES[1], to_json(_settings(file, tokenizer), indent=2))
    return folder


def _settings(file: GGUFFile, tokenizer: Tokenizer) -> Json:
    metadata = file.metadata
    ids = {name: getattr(tokenizer, attribute) for name, attribute in _SPECIAL.items()}
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokenizer.token_text(i) for name, i in ids.items() if i is not None},
        **({"model_max_length": context} if context else {}),
        **({"chat_template": template} if template else {}),
        "clean_up_tokenization_spaces": False,
    }
