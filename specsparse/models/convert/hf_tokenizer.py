"""The tokenizer of a checkpoint -> GGUF metadata (tokenizer.model of sentencepiece, or tokenizer.json), and back."""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import pre_tokenizers

from specsparse.engine.gguf.reader import GGUFFile
from specsparse.engine.text.bpe import PRE_TOKENIZERS, PreTokenizer
from specsparse.engine.text.spm import SPACE
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.engine.text.vocabulary import TokenType
from specsparse.errors import UserError
from specsparse.models.convert.hf_config import read_json
from specsparse.support.files import Json, read_text, to_json, write_atomically

PROBE = (
    "Hello world, it's 1234567 o'clock; WE'LL see!\n\n\tdef f(x):\r\n        return {'a': x**2}  # \u00e9t\u00e9\n"
    " \u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \u4f60\u597d\u4e16\u754c "
    "\u3053\u3093\u306b\u3061\u306f \uc548\ub155 \U0001f642\U0001f680   3.14, $5 (50%) a/b\\c \u2026end  "
)
"""A text that tells tokenizers apart: contractions, digits, case, spaces, line ends, scripts, signs."""
_LIKELY = ("llama-bpe", "smollm", "qwen2", "gpt-2", "dbrx", "tekken", "gpt-4o", "deepseek-llm", "falcon")
_MOST_TOKENS = 1 << 22
"""No vocabulary comes near; an id beyond would make a list as long."""
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
NAMES = ("tokenizer.json", "tokenizer_config.json")
"""The files that `write_tokenizer` writes."""


def tokenizer_keys(folder: Path, config: Json, *, vocab_size: int, pre: str | None = None) -> Json:
    """`tokenizer.*` keys of a checkpoint. UserError: no tokenizer, one of another family, more tokens than rows, or one
    that would give other ids here.

    Args:
        vocab_size: rows of the embedding; ids without a token become unused ones.
        pre: name of the pre-tokenizer of a byte-level BPE; None finds the one that cuts a test text alike.
    """
    settings, fast = read_json(folder / "tokenizer_config.json", optional=True), None
    if (folder / "tokenizer.json").is_file():
        try:
            fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(f"{folder / 'tokenizer.json'}: cannot be read: {str(error).splitlines()[0]}") from None
    if (folder / "tokenizer.model").is_file():
        keys, reference = _from_sentencepiece(folder / "tokenizer.model")
    elif fast is None:
        raise UserError(f"{folder}: has no tokenizer.model and no tokenizer.json")
    else:
        keys, reference = _from_json(folder, fast, pre)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]

    def extend(size: int) -> None:
        missing = range(len(tokens), size)
        tokens.extend(f"[PAD{i}]" for i in missing)
        types.extend([int(TokenType.UNUSED)] * len(missing))
        keys.get("tokenizer.ggml.scores", []).extend([-10000.0] * len(missing))

    # Tokens that were added to the vocabulary, special ones as control tokens.
    names, by_id = read_json(folder / "added_tokens.json", optional=True), settings.get("added_tokens_decoder") or {}
    try:
        added = {int(i): (text, False) for text, i in names.items()}
        added |= {int(i): (token["content"], bool(token.get("special"))) for i, token in by_id.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{folder}: added_tokens.json or added_tokens_decoder is no table of tokens and ids") from None
    if fast is not None:
        added |= {i: (token.content, token.special) for i, token in fast.get_added_tokens_decoder().items()}
    if wrong := [i for i, (text, _) in added.items() if not (0 <= i < _MOST_TOKENS and isinstance(text, str))]:
        raise UserError(f"{folder}: the added token {wrong[0]} is no text, or its id is not 0 to {_MOST_TOKENS - 1}")
    for i, (text, special) in sorted(added.items()):
        extend(i + 1)
        tokens[i] = text
        if types[i] not in (TokenType.UNKNOWN, TokenType.BYTE):
            types[i] = int(TokenType.CONTROL if special else TokenType.USER_DEFINED)

    # As many as the embedding has rows: an added one without a row, such as Gemma's for images, cannot be read.
    if any(i not in added for i in range(vocab_size, len(tokens))):
        raise UserError(f"{folder}: the tokenizer has {len(tokens)} tokens and the embedding {vocab_size} rows")
    for name in ("tokens", "token_type", "scores"):
        del keys.get(f"tokenizer.ggml.{name}", [])[vocab_size:]
    extend(vocab_size)

    # Special tokens: by text in tokenizer_config.json, else by id in config.json.
    index, ids = {token: i for i, token in enumerate(tokens)}, {}
    for short, name in _SPECIAL.items():
        text, given = settings.get(f"{short}_token"), config.get(f"{short}_token_id")
        text = text.get("content") if isinstance(text, dict) else text
        given = given[0] if isinstance(given, list) and given else given
        found = index.get(text, given) if isinstance(text, str) else given
        if isinstance(found, int) and 0 <= found < len(tokens):
            ids[name] = found
    keys |= {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}

    # BOS and EOS around a text: as tokenizer.json does it, else as the settings say.
    spm = keys["tokenizer.ggml.model"] == "llama"
    adds = {"bos": settings.get("add_bos_token", spm), "eos": settings.get("add_eos_token", False)}
    if fast is not None:
        around = fast.encode("a", add_special_tokens=True).ids
        adds = {"bos": around[:1] == [ids.get("bos")], "eos": around[-1:] == [ids.get("eos")]}
    keys |= {f"tokenizer.ggml.add_{name}_token": bool(value) and name in ids for name, value in adds.items()}

    # The chat template: a file of its own, or in the settings, which may have several by name.
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = read_text(folder / "chat_template.jinja")
    elif isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if isinstance(template, str) and template:
        keys["tokenizer.chat_template"] = template

    ours = Tokenizer.from_metadata(keys, where=str(folder)).encode(PROBE)
    _need_equal(ours, reference, f"{folder}: its tokenizer works in a way that GGUF cannot say", "is")
    return keys


def _need_equal(ours: Sequence[int], wanted: Sequence[int], what: str, verb: str) -> None:
    if list(ours) != list(wanted):
        at = next((i for i, (a, b) in enumerate(zip(ours, wanted)) if a != b), min(len(ours), len(wanted)))
        raise UserError(f"{what}: token {at} of a test text {verb} {ours[at : at + 1]} and not {wanted[at : at + 1]}")


def _from_sentencepiece(path: Path) -> tuple[Json, list[int]]:
    """Keys of tokenizer.model, and its ids of the probe."""
    try:
        sp = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        raise UserError(f"{path}: is no sentencepiece model") from None
    kinds = (
        (sp.IsUnknown, TokenType.UNKNOWN), (sp.IsControl, TokenType.CONTROL), (sp.IsByte, TokenType.BYTE),
        (sp.IsUnused, TokenType.UNUSED),
    )  # fmt: skip
    ids = range(sp.get_piece_size())
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(sp.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [next((int(t) for f, t in kinds if f(i)), int(TokenType.NORMAL)) for i in ids],
        "tokenizer.ggml.add_space_prefix": sp.encode("a", out_type=str)[0].startswith(SPACE),
    }
    return keys, sp.encode(PROBE)


def _from_json(folder: Path, fast: tokenizers.Tokenizer, pre: str | None) -> tuple[Json, list[int]]:
    """Keys of tokenizer.json, and its ids of the probe.

    Without `pre` it takes the name of the pre-tokenizer that cuts the probe as this tokenizer does.
    """
    model = read_json(folder / "tokenizer.json").get("model", {})
    if model.get("type") != "BPE":
        raise UserError(f"{folder}: tokenizer.json is of type {model.get('type')}; only BPE is supported")
    by_id = {i: token for token, i in fast.get_vocab(with_added_tokens=True).items()}
    if max(by_id, default=0) >= _MOST_TOKENS:
        raise UserError(f"{folder}: tokenizer.json has the id {max(by_id)}; ids up to {_MOST_TOKENS - 1} are supported")
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id, default=-1) + 1)]
    plain = set(model["vocab"].values())
    types = [int(TokenType.NORMAL if i in plain else TokenType.UNUSED) for i in range(len(tokens))]
    keys: Json = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    reference = fast.encode(PROBE, add_special_tokens=False).ids
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):  # a sentencepiece model written as BPE: the earlier a merge, the higher its score
        for i, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                types[i] = int(TokenType.BYTE)
            elif token == model.get("unk_token"):
                types[i] = int(TokenType.UNKNOWN)
        prefix = fast.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE)
        # Not by id: Llama 2's runs of blanks have ids among the first and merge last.
        ranks = {token: i for i, token in enumerate(dict.fromkeys(map("".join, merges)))}
        scores = [-float(ranks.get(token, len(ranks) + i)) for i, token in enumerate(tokens)]
        keys |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": scores}
        return keys | {"tokenizer.ggml.add_space_prefix": prefix}, reference
    if pre is None:

        def pieces(known: PreTokenizer) -> list[str]:
            splits = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in known.regexes]
            steps = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(PROBE)]

        theirs = fast.pre_tokenizer.pre_tokenize_str(PROBE) if fast.pre_tokenizer is not None else []
        wanted, ignores = [piece for piece, _ in theirs], bool(model.get("ignore_merges"))
        alike = [name for name in (*_LIKELY, *PRE_TOKENIZERS) if pieces(PRE_TOKENIZERS[name]) == wanted]
        if not alike:
            known = ", ".join(PRE_TOKENIZERS)
            raise UserError(f"{folder}: its pre-tokenizer is none that is known; name one with --pre, of {known}")
        pre = next((name for name in alike if PRE_TOKENIZERS[name].ignore_merges == ignores), alike[0])
    keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    return keys | {"tokenizer.ggml.merges": list(map(" ".join, merges))}, reference


def write_tokenizer(file: GGUFFile, folder: Path) -> Path:
    """Writes the tokenizer of a GGUF file for transformers and load generators: tokenizer.json and
    tokenizer_config.json, which holds the chat template; UserError for one that tokenizer.json cannot say."""
    metadata = file.metadata
    tokenizer = Tokenizer.from_metadata(metadata, where=str(file.path))
    library = tokenizer.library()
    what = f"{file.path}: its tokenizer works in a way that tokenizer.json cannot say"
    for text in (PROBE, PROBE.swapcase().replace(" ", "  ")):
        ours = tokenizer.encode(text, add_special=True, parse_special=True)
        _need_equal(library.encode(text).ids, ours, what, "would be")
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unk": tokenizer.unknown_id}
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    template = metadata.get("tokenizer.chat_template")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokenizer.token_text(i) for name, i in ids.items() if i is not None},
        **({"model_max_length": context} if context else {}),
        **({"chat_template": template} if template else {}),
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(folder / NAMES[0], library.to_str())
    write_atomically(folder / NAMES[1], to_json(settings, indent=2))
    return folder
