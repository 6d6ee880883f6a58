"""A tokenizer of a GGUF file as one of the `tokenizers` library, which other programs read from tokenizer.json."""

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from specsparse.engine.text.bpe import BpeCodec
from specsparse.engine.text.spm import SPACE, SpmCodec
from specsparse.engine.text.vocabulary import HIDDEN, TokenType, Vocab


def as_library(
    vocab: Vocab, codec: SpmCodec | BpeCodec, *, bos: bool, eos: bool, space_prefix: bool
) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary and its rules; see `Tokenizer` of `specsparse.engine.text.tokenizer`."""
    library = _of_bpe(codec) if isinstance(codec, BpeCodec) else _of_spm(vocab, space_prefix=space_prefix)
    _add_tokens(library, vocab)
    _add_ends(library, vocab, bos=bos, eos=eos)
    return library


def _add_tokens(library: tokenizers.Tokenizer, vocab: Vocab) -> None:
    """Marks the tokens that are cut out of a text before it is tokenized; special ones can be left out of a text."""
    for text, index in vocab.fixed:
        kind, token = vocab.types[index], tokenizers.AddedToken(text, normalized=False)
        if kind in HIDDEN:
            library.add_special_tokens([token])
        elif kind == TokenType.USER_DEFINED:
            library.add_tokens([token])


def _add_ends(library: tokenizers.Tokenizer, vocab: Vocab, *, bos: bool, eos: bool) -> None:
    """Puts BOS and EOS around a text."""
    ends = {name: vocab.special[name] for name, wanted in (("bos", bos), ("eos", eos)) if wanted}
    if not ends:
        return
    texts = {name: vocab.tokens[index] for name, index in ends.items()}
    single = [*([texts["bos"]] if bos else []), "$A", *([texts["eos"]] if eos else [])]
    pair = [*single, *(part.replace("$A", "$B") + ":1" for part in single)]
    special = [(texts[name], index) for name, index in ends.items()]
    library.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _of_bpe(codec: BpeCodec) -> tokenizers.Tokenizer:
    """A copy of byte-level BPE that decodes, too."""
    library = tokenizers.Tokenizer.from_str(codec.library.to_str())
    library.decoder = decoders.ByteLevel()
    return library


def _of_spm(vocab: Vocab, *, space_prefix: bool) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: two neighbours are joined to the token of the highest score."""
    unknown = next((vocab.tokens[i] for i, kind in enumerate(vocab.types) if kind == TokenType.UNKNOWN), None)
    bytes_too = all(f"<0x{byte:02X}>" in vocab.ids for byte in range(256))
    merges = []
    for index, token in enumerate(vocab.tokens):
        if vocab.types[index] in (TokenType.BYTE, TokenType.UNKNOWN):
            continue
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        parts = [(a, b) for a, b in parts if a in vocab.ids and b in vocab.ids]
        merges += [(-vocab.scores[index], index, vocab.ids[a], vocab.ids[b], (a, b)) for a, b in parts]
    pairs = [merge[-1] for merge in sorted(merges)]
    model = models.BPE(vocab.ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too)
    library = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if space_prefix else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(content=" ", left=1)] if space_prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return library
