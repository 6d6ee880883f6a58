"""The options of the built-in drafters; jax is not imported, so that a mistyped one is answered at once.

A drafter of one's own needs no class here: the fields of its own dataclass are its options.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from specsparse.errors import UserError
from specsparse.speculative.gamma import MAX_GAMMA, SHORT_GAMMA, MaxNodes
from specsparse.support.options import Also, Count, Inline, Range, Read


def _ids(value: str | Path | Iterable) -> tuple[int, ...]:
    """Token ids of a list, or of a text file."""
    items = Path(value).read_text().split() if isinstance(value, str | Path) else value
    return tuple(int(item) for item in items)


def _vocab(value: int | str | Path | Iterable) -> int | tuple[int, ...]:
    """The first so many ids, or those of a list or file."""
    if isinstance(value, int):
        if isinstance(value, bool) or value < 1:
            raise ValueError
        return value
    return _ids(value)


def _model(value: object) -> object:
    """A path, a name or a loaded model, told by what it can do: its class would import jax."""
    if not isinstance(value, str | Path) and not hasattr(value, "params_for"):
        raise TypeError
    return value


def _template(value: object) -> object:
    if not hasattr(value, "parents"):
        raise TypeError
    return value


def _head(value: object) -> object:
    """A path, a name or a head that was read."""
    if not isinstance(value, str | Path) and not hasattr(value, "tensors"):
        raise TypeError
    return value


NgramSize = Annotated[int, Range(1, 64)]
Probability = Annotated[float, Range(0, 1)]
SizeN = Annotated[int, Range(1, 64), Also("ngram_size_n", "spec_ngram_size_n")]
SizeM = Annotated[int, Range(1, MAX_GAMMA), Also("ngram_size_m", "spec_ngram_size_m")]
Temperature = Annotated[float, Range(0, 1e4), Also("draft_temperature")]
PMin = Annotated[float, Range(0, 1), Also("draft_p_min")]
Vocab = Annotated[int | tuple[int, ...] | None, Read(_vocab, "a number, a list of ids or a file of ids")]


@dataclass(frozen=True)
class Ngrams:
    """Which n-grams are looked up.

    Attributes:
        ngram_max: longest; by default 3, or `ngram_min` where that is more.
        ngram_min: shortest; by default 2, or `ngram_max` where that is less. 1 in the original: one-token matches
            draft more than they win.
    """

    ngram_max: Annotated[NgramSize | None, Also("prompt_lookup_max", "max_matching_ngram_size")] = None
    ngram_min: Annotated[NgramSize | None, Also("prompt_lookup_min")] = None

    def __post_init__(self):
        low = self.ngram_min if self.ngram_min is not None else min(2, self.ngram_max or 2)
        high = self.ngram_max if self.ngram_max is not None else max(3, low)
        if high < low:
            raise UserError(f"drafter.ngram_max={high} must be at least ngram_min={low}")
        object.__setattr__(self, "ngram_min", low)
        object.__setattr__(self, "ngram_max", high)


@dataclass(frozen=True)
class PromptLookupOptions(Ngrams):
    """What followed the last n tokens earlier in the text (Saxena 2023).

    Attributes:
        max_nodes: tokens drafted at most.
    """

    max_nodes: MaxNodes = SHORT_GAMMA


@dataclass(frozen=True)
class NgramSimpleOptions:
    """What followed the last n tokens when they last occurred; llama.cpp's `ngram-simple`.

    Attributes:
        max_nodes: tokens drafted at most.
        size_n: tokens looked up.
        size_m: tokens copied at most, before `max_nodes` cuts them.
    """

    max_nodes: MaxNodes = SHORT_GAMMA
    size_n: SizeN = 12
    size_m: SizeM = 48


@dataclass(frozen=True)
class NgramMapOptions(NgramSimpleOptions):
    """The same for n-grams that occur often enough and that a whole m-gram follows; llama.cpp's `ngram-map-k`.

    Attributes:
        size_m: tokens that must follow, and are copied at most.
        min_hits: times the n-gram must have occurred.
    """

    min_hits: Annotated[Count, Also("ngram_min_hits", "spec_ngram_min_hits")] = 1


@dataclass(frozen=True)
class SuffixOptions:
    """The longest suffix that occurred before, and the continuation most of its matches agree on (SuffixDecoding).

    Attributes:
        max_nodes: tokens drafted at most.
        longest: match lengths are counted up to this (the depth of the suffix tree).
        min_match: shortest match that is drafted from.
        factor: draft tokens per matched token.
        offset: draft tokens more.
        min_share: share of the candidates that must agree with the draft up to each token.
        candidates: matches that vote at most.
    """

    max_nodes: MaxNodes = SHORT_GAMMA
    longest: Annotated[int, Range(1, 4096), Also("suffix_decoding_max_tree_depth")] = 64
    min_match: Annotated[int, Range(1, 4096)] = 1
    factor: Annotated[float, Range(0.01, 1024), Also("suffix_decoding_max_spec_factor")] = 1.0
    offset: Annotated[int, Range(-MAX_GAMMA, MAX_GAMMA)] = 0
    min_share: Annotated[Probability, Also("suffix_decoding_min_token_prob")] = 0.1
    candidates: Annotated[int, Range(1, 64)] = 8

    def __post_init__(self):
        if self.min_match > self.longest:
            raise UserError(f"drafter.min_match={self.min_match} must be at most longest={self.longest}")


@dataclass(frozen=True)
class ScriptedOptions:
    """Right where it is told to be, for measuring and for tests: a chain by `accept`, or a tree by `ends`.

    Attributes:
        max_nodes: tokens of a chain.
        accept: right tokens of each round, repeated for ever; by default all.
        vocab_size: ids are drafted below it.
        truth: ids of the whole text.
        template: a `TreeTemplate`, instead of a chain.
        ends: last right node of each round, with a template.
    """

    max_nodes: MaxNodes = SHORT_GAMMA
    accept: tuple[int, ...] | None = None
    vocab_size: Annotated[int, Range(2, 2**31 - 1)] = 256
    truth: Annotated[tuple[int, ...], Read(_ids, "a list of ids")] = ()
    template: Annotated[object | None, Read(_template, "a TreeTemplate")] = None
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Drafting:
    """How a model drafts, whatever model it is.

    Attributes:
        max_nodes: tokens drafted at most; by default a few, or what the policy that pays allows.
        temperature: of the draft: 0 for argmax drafts, for greedy, match and delta; above, drawn from q, for match,
            token and block.
        top_k, top_p, min_p: truncation of the draft's law, as in `SamplingParams`.
        draw: argmax (also greedy) or sampled (also probabilistic); by default as the temperature says.
        p_min: stop before a law whose top probability (over its top ten) is under it.
        n_min: drop drafts that are shorter; argmax drafts only.
        draft_vocab: score these ids only: a number N (the first N), a list, or a file of ids; by default all, or those
            of the head's file.
        policy: a `Policy`, instead of `max_nodes`, `p_min` and `n_min`.
        tree: a `TreeShape` or the name of one, for drafts that branch.
    """

    max_nodes: MaxNodes | None = None
    temperature: Temperature = 0.0
    top_k: Annotated[int, Range(-1, 2**31 - 1)] = -1
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    draw: Annotated[Literal["argmax", "greedy", "sampled", "probabilistic"] | None, Also("draft_sample_method")] = None
    p_min: PMin = 0.0
    n_min: Annotated[int, Range(0, MAX_GAMMA), Also("draft_min")] = 0
    draft_vocab: Vocab = None
    policy: object | None = None
    tree: object | None = None


@dataclass(frozen=True)
class ChainDrafting:
    """How a model beside a lookup drafts.

    Attributes:
        max_nodes: tokens drafted at most; by default a few, or what the policy that pays allows.
        temperature: of the draft: 0 for argmax; by default 0, or three quarters of the target's under verifier=token
            and block, which draws drafts from q.
        p_min: stop before a law whose top probability (over its top ten) is under it; by default 0.6 where the length
            is fixed, else 0.
        draft_vocab: score these ids only; by default those of the head's file.
        policy: a `Policy`, instead of `max_nodes` and `p_min`.
    """

    max_nodes: MaxNodes | None = None
    temperature: Temperature | None = None
    p_min: PMin | None = None
    draft_vocab: Vocab = None
    policy: object | None = None


@dataclass(frozen=True)
class HeadDrafting(Drafting):
    """How a head drafts by itself: as `Drafting`, but for what nobody says.

    Attributes:
        temperature: of the draft: 0 for argmax; by default 0, or three quarters of the target's under verifier=token
            and block, which draws drafts from q.
    """

    temperature: Temperature | None = None


WEIGHS_DRAWS = ("token", "block")
"""Verifiers of chains that weigh p against the law that drafts were drawn from."""
DRAWS_COLDER = 0.75
"""Temperature of a head's draws over the target's, where nobody says: a head is less sure than its target, and more of
p and q is in common when it draws colder (docs/LOG.md)."""


def draw_temperature(verifier: str, temperature: float) -> float | None:
    """That of drafts which that verifier weighs, of a target at `temperature`; None where argmax drafts do."""
    return DRAWS_COLDER * temperature if verifier in WEIGHS_DRAWS and temperature > 0 else None


How = TypeVar("How", Drafting, ChainDrafting)


def under(how: How, policy: object) -> How:
    """The same under a policy, which says how long drafts are."""
    lengths = ("max_nodes", "p_min", "n_min")
    return replace(how, policy=policy, **{f.name: f.default for f in fields(how) if f.name in lengths})


@dataclass(frozen=True)
class ModelOptions:
    """A smaller model, of the target's family or not, with a cache of its own.

    Attributes:
        model: its GGUF file, a name as in model.path, or a loaded model.
        drafting: how it drafts.
        vocabulary: same, an id is the same token in both models, else they are refused; tli, only tokens whose bytes
            the target has too are drafted, for any verifier; slem, the draft's text is cut into the target's tokens,
            one-hot chains (both arXiv:2502.05202); auto, same where the vocabularies are, else tli.
        special_tokens: target goes on with the target's ids where BOS or EOS differ.
    """

    model: Annotated[object | None, Read(_model, "a GGUF file, a name or a loaded model"), Also("path")] = None
    drafting: Annotated[Drafting, Inline()] = Drafting()
    vocabulary: Literal["auto", "same", "tli", "slem"] = "auto"
    special_tokens: Literal["target"] | None = None

    def __post_init__(self):
        if self.special_tokens is not None and self.vocabulary in ("tli", "slem"):
            raise UserError(
                "drafter.special_tokens is for vocabularies that are otherwise the same: leave it out, since "
                f"vocabulary={self.vocabulary} brings special ids together by itself"
            )
        if self.vocabulary == "slem" and self.drafting.tree is not None:
            raise UserError("drafter.vocabulary=slem drafts chains: leave tree out, or choose vocabulary=tli")
        if self.vocabulary == "slem" and self.drafting.draft_vocab is not None:
            raise UserError("drafter.vocabulary=slem scores all that the draft writes: leave draft_vocab out")


@dataclass(frozen=True)
class LayerSkipOptions:
    """Some of the target's own layers, on the target's cache (Draft & Verify, arXiv:2309.08168).

    Attributes:
        layers: those that run; by default the first and the last quarter, and every other one between.
        drafting: how they draft.
    """

    layers: tuple[int, ...] | None = None
    drafting: Annotated[Drafting, Inline()] = Drafting()


@dataclass(frozen=True)
class SparseSelfOptions:
    """The target with few of its neurons, on the target's cache.

    Attributes:
        rule: hot, one set with the most energy on a text, as a smaller dense FFN; gate, each token's largest
            |act(gate)| of a dense target; own, a sparse target's own predictors with another threshold.
        share: of the neurons, for hot and gate; by default 0.5.
        threshold: for own.
        text: token ids (a list or a file) to choose by; by default a text that the target writes itself.
        drafting: how it drafts.
    """

    rule: Literal["hot", "gate", "own"] = "hot"
    share: Annotated[float, Range(1e-3, 1)] | None = None
    threshold: float | None = None
    text: Annotated[tuple[int, ...] | None, Read(_ids, "a list of ids or a file of ids")] = None
    drafting: Annotated[Drafting, Inline()] = Drafting()

    def __post_init__(self):
        own = self.rule == "own"
        if own != (self.threshold is not None) or (own and self.share is not None):
            raise UserError("drafter.threshold goes with rule=own, and drafter.share with rule=hot and rule=gate")
        if own and self.text is not None:
            raise UserError("drafter.text goes with rule=hot and rule=gate, which choose neurons by it")
        if self.text == ():
            raise UserError("drafter.text holds no ids: give some, or leave it out for a text that the target writes")


@dataclass(frozen=True)
class HeadOptions:
    """One layer on the target's features, before the target's output matrix (EAGLE, arXiv:2401.15077).

    Attributes:
        head: its file, or a name; by default the one that was trained for the target.
        drafting: how it drafts.
    """

    head: str | Path | None = None
    drafting: Annotated[HeadDrafting, Inline()] = HeadDrafting()


@dataclass(frozen=True)
class PublishedOptions:
    """What heads have in common that other projects publish.

    Attributes:
        path: its folder (config.json and safetensors, or pytorch_model.bin of EAGLE-3), a GGUF file, hf://owner/repo,
            or a name of the catalogue.
        drafting: how it drafts.
    """

    path: Annotated[object | None, Read(_head, "a folder, a GGUF file or a name")] = None
    drafting: Annotated[Drafting, Inline()] = Drafting()


@dataclass(frozen=True)
class Eagle3Options(PublishedOptions):
    """One layer on the features of three of the target's layers, as other projects publish it (EAGLE-3,
    arXiv:2503.01840). Its options are those of `PublishedOptions`."""


@dataclass(frozen=True)
class DFlashOptions(PublishedOptions):
    """A block of tokens in one forward, from the target's features (DFlash, arXiv:2602.06036).

    Attributes:
        block_size: rows of a block, the last token among them; by default as many as it was trained for.
    """

    block_size: Annotated[int, Range(1, MAX_GAMMA)] | None = None


@dataclass(frozen=True)
class LookupHeadOptions(Ngrams):
    """Prompt lookup where the text repeats itself; where it does not, a head drafts.

    Attributes:
        head: its file, or a name; by default the one that was trained for the target.
        drafting: how the head drafts.
    """

    head: str | Path | None = None
    drafting: Annotated[ChainDrafting, Inline()] = ChainDrafting()
