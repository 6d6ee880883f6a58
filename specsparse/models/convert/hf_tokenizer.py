"""The tokenizer of a checkpoint -> GGUF metadata: tokenizer.model of sentencepiece, or tokenizer.json."""

from collections.abc import Collection, Mapping
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import pre_tokenizers

from specsparse.engine.text.pre_tokenizer import PRE_TOKENIZERS, PreTokenizer
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.engine.text.vocabulary import TokenType
from specsparse.errors import UserError
from specsparse.models.convert.checkpoint import read_json
from specsparse.support.json_files import Json

PROBE = (
    "Hello world, it's 1234567 o'clock; WE'LL see!\n\n\tdef f(x):\r\n        return {'a': x**2}  # \u00e9t\u00e9\n"
    " \u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \u4f60\u597d\u4e16\u754c "
    "\u3053\u3093\u306b\u3061\u306f \uc548\ub155 \U0001f642\U0001f680   3.14, $5 (50%) a/b\\c \u2026end  "
)
"""What tells tokenizers apart: contractions, digits, case, spaces, line ends, scripts, signs."""
_LIKELY = ("llama-bpe", "smollm", "qwen2", "gpt-2", "dbrx", "tekken", "gpt-4o", "deepseek-llm", "falcon")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"


def tokenizer_keys(folder: Path, config: Json, *, vocab_size: int, pre: str | None = None) -> dict:
    """`tokenizer.*` keys.

    Args:
        folder: of the checkpoint.
        config: config.json.
        vocab_size: rows of the embedding; ids without a token become unused ones.
        pre: name of the pre-tokenizer of a byte-level BPE; None finds it by what it does.

    Raises:
        UserError: no tokenizer, one of another family, more tokens than rows, or one that would give other ids here.
    """
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    fast = _fast(folder)
    if (folder / "tokenizer.model").is_file():
        keys, reference = _sentencepiece(folder)
    elif fast is None:
        raise UserError(f"{folder}: has no tokenizer.model and no tokenizer.json")
    else:
        keys, reference = _from_json(folder, fast, pre)
    added = _added(settings, folder, fast)
    _add_tokens(keys, added)
    _fill(keys, folder, vocab_size, added.keys())
    ids = _special_ids(keys, settings, config)
    keys |= {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    keys |= _adds(settings, fast, ids, spm=keys["tokenizer.ggml.model"] == "llama")
    template = _template(folder, settings)
    keys |= {"tokenizer.chat_template": template} if template else {}
    _check(keys, folder, reference)
    return keys


def _fast(folder: Path) -> tokenizers.Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None


def _sentencepiece(folder: Path) -> tuple[Json, list[int]]:
    """Keys of tokenizer.model, and its ids of the probe."""
    path = folder / "tokenizer.model"
    try:
        sp = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        raise UserError(f"{path}: is no sentencepiece model") from None
    kinds = (
        ("IsUnknown", TokenType.UNKNOWN), ("IsControl", TokenType.CONTROL), ("IsByte", TokenType.BYTE),
        ("IsUnused", TokenType.UNUSED),
    )  # fmt: skip
    size = sp.get_piece_size()
    types = [next((int(t) for f, t in kinds if getattr(sp, f)(i)), int(TokenType.NORMAL)) for i in range(size)]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [float(sp.get_score(i)) for i in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": sp.encode("a", out_type=str)[0].startswith(_SPACE),
    }
    return keys, sp.encode(PROBE)


def _from_json(folder: Path, fast: tokenizers.Tokenizer, pre: str | None) -> tuple[Json, list[int]]:
    """Keys of tokenizer.json, and its ids of the probe."""
    model = read_json(folder / "tokenizer.json").get("model", {})
    if model.get("type") != "BPE":
        raise UserError(f"{folder}: tokenizer.json is of type {model.get('type')}; only BPE is supported")
    by_id = {i: token for token, i in fast.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
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
        prefix = bool(fast.encode("a", add_special_tokens=False).tokens[0].startswith(_SPACE))
        keys |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        # Not by id: Llama 2's runs of blanks have ids among the first and merge last.
        ranks = {token: i for i, token in enumerate(dict.fromkeys(map("".join, merges)))}
        keys |= {"tokenizer.ggml.scores": [-float(ranks.get(token, len(ranks) + i)) for i, token in enumerate(tokens)]}
        return keys | {"tokenizer.ggml.add_space_prefix": prefix}, reference
    found = pre or _pre_tokenizer(folder, fast, ignore_merges=bool(model.get("ignore_merges")))
    keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": found}
    return keys | {"tokenizer.ggml.merges": list(map(" ".join, merges))}, reference


def _pre_tokenizer(folder: Path, fast: tokenizers.Tokenizer, *, ignore_merges: bool) -> str:
    """The name of the pre-tokenizer that cuts the probe as this tokenizer does."""
    if fast.pre_tokenizer is None:
        raise UserError(f"{folder}: tokenizer.json has no pre-tokenizer; name one with --pre")
    wanted = [piece for piece, _ in fast.pre_tokenizer.pre_tokenize_str(PROBE)]
    alike = [name for name in (*_LIKELY, *PRE_TOKENIZERS) if _pieces(PRE_TOKENIZERS[name]) == wanted]
    exact = [name for name in alike if PRE_TOKENIZERS[name].ignore_merges == ignore_merges]
    if not alike:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{folder}: its pre-tokenizer is none that is known; name one with --pre, of {known}")
    return (exact or alike)[0]


def _pieces(pre: PreTokenizer) -> list[str]:
    """The probe, cut."""
    splits = [pre_tokenizers.Split(tokenizers.Regex(regex), "isolated") for regex in pre.regexes]
    steps = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(PROBE)]


def _added(settings: Json, folder: Path, fast: tokenizers.Tokenizer | None) -> dict[int, tuple[str, bool]]:
    """Id -> (text, special) of the tokens that were added to the vocabulary."""
    found = {int(i): (text, False) for text, i in read_json(folder / "added_tokens.json", optional=True).items()}
    decoder = settings.get("added_tokens_decoder", {})
    found |= {int(i): (token["content"], bool(token.get("special"))) for i, token in decoder.items()}
    if fast is not None:
        found |= {i: (token.content, token.special) for i, token in fast.get_added_tokens_decoder().items()}
    return found


def _add_tokens(keys: Json, added: Mapping[int, tuple[str, bool]]) -> None:
    """Puts added tokens into the vocabulary, special ones as control tokens."""
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    for i, (text, special) in sorted(added.items()):
        _extend(keys, i + 1)
        tokens[i] = text
        if types[i] not in (TokenType.UNKNOWN, TokenType.BYTE):
            types[i] = int(TokenType.CONTROL if special else TokenType.USER_DEFINED)


def _extend(keys: Json, size: int) -> None:
    """Unused tokens up to `size`."""
    tokens = keys["tokenizer.ggml.tokens"]
    missing = range(len(tokens), size)
    tokens += [f"[PAD{i}]" for i in missing]
    keys["tokenizer.ggml.token_type"] += [int(TokenType.UNUSED)] * len(missing)
    if "tokenizer.ggml.scores" in keys:
        keys["tokenizer.ggml.scores"] += [-10000.0] * len(missing)


def _fill(keys: Json, folder: Path, vocab_size: int, added: Collection[int]) -> None:
    """As many tokens as the embedding has rows. An added token without a row, such as Gemma's for images, is left out:
    the model cannot read it."""
    count = len(keys["tokenizer.ggml.tokens"])
    if any(i not in added for i in range(vocab_size, count)):
        raise UserError(f"{folder}: the tokenizer has {count} tokens and the embedding {vocab_size} rows")
    for name in ("tokens", "token_type", "scores"):
        if f"tokenizer.ggml.{name}" in keys:
            del keys[f"tokenizer.ggml.{name}"][vocab_size:]
    _extend(keys, vocab_size)


def _special_ids(keys: Json, settings: Json, config: Json) -> dict[str, int]:
    """bos, eos, unknown and padding: by text in tokenizer_config.json, else by id in config.json."""
    tokens = keys["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    out = {}
    for short, name in _SPECIAL.items():
        text = settings.get(f"{short}_token")
        text = text.get("content") if isinstance(text, dict) else text
        index = config.get(f"{short}_token_id")
        index = index[0] if isinstance(index, list) and index else index
        found = ids.get(text, index)
        if isinstance(found, int) and 0 <= found < len(tokens):
            out[name] = found
    return out


def _adds(settings: Json, fast: tokenizers.Tokenizer | None, ids: Mapping[str, int], *, spm: bool) -> dict[str, bool]:
    """Whether BOS and EOS are put around a text: what tokenizer.json does, else what the settings say."""
    out = {"bos": settings.get("add_bos_token", spm), "eos": settings.get("add_eos_token", False)}
    if fast is not None:
        around = fast.encode("a", add_special_tokens=True).ids
        out = {"bos": around[:1] == [ids.get("bos")], "eos": around[-1:] == [ids.get("eos")]}
    return {f"tokenizer.ggml.add_{name}_token": bool(value) and name in ids for name, value in out.items()}


def _template(folder: Path, settings: Json) -> str | None:
    """The chat template: a file of its own, or in the settings, where several may have names."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _check(keys: Json, folder: Path, reference: list[int]) -> None:
    """The tokenizer that was written gives the ids of the one that was read."""
    ours = Tokenizer.from_metadata(keys, where=str(folder)).encode(PROBE)
    if ours != reference:
        at = next((i for i, (a, b) in enumerate(zip(ours, reference)) if a != b), min(len(ours), len(reference)))
        raise UserError(
            f"{folder}: its tokenizer works in a way that GGUF cannot say: token {at} of a test text is "
            f"{ours[at : at + 1]} and not {reference[at : at + 1]}"
        )
