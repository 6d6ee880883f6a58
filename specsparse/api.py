"""What notebooks use: load a model, generate, stream."""

import difflib
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, overload

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError, refuse
from specsparse.runtime.load import load
from specsparse.runtime.loops import NOTED_ROUNDS, Watch
from specsparse.runtime.method import MethodSpec, ready
from specsparse.runtime.prefix_cache import PrefixCache
from specsparse.runtime.results import Generation, GenerationStats, Stream, best_of, decode, generations
from specsparse.runtime.session import PromptLike, Session, requests
from specsparse.speculative.base import AnyDrafter, Verifier
from specsparse.speculative.policies.base import Policy
from specsparse.support.neighbours import WORDS, understood
from specsparse.support.options import nearest, options_of, shown

__all__ = ["Generation", "GenerationStats", "Model", "SamplingParams", "Stream", "generate", "load", "stream"]


@overload  # `n`, of which one gives no list
def generate(
    model: Model, prompt: PromptLike, *, n: int, max_tokens: int | None = ..., sampling: SamplingParams | None = ...,
    drafter: str | AnyDrafter | None = ..., verifier: str | Verifier | None = ..., policy: str | Policy | None = ...,
    seed: int | None = ..., loop: str = ..., watch: Watch | None = ..., common_noise: bool = ...,
    prefix_cache: PrefixCache | None = ..., **fields: Any,
) -> Generation | list[Generation]: ...  # fmt: skip
@overload
def generate(
    model: Model, prompt: PromptLike, *, max_tokens: int | None = ..., sampling: SamplingParams | None = ...,
    drafter: str | AnyDrafter | None = ..., verifier: str | Verifier | None = ..., policy: str | Policy | None = ...,
    seed: int | None = ..., loop: str = ..., watch: Watch | None = ..., common_noise: bool = ...,
    prefix_cache: PrefixCache | None = ..., **fields: Any,
) -> Generation: ...  # fmt: skip
@overload
def generate(
    model: Model, prompt: Seq[PromptLike], *, max_tokens: int | None = ...,
    sampling: SamplingParams | Seq[SamplingParams] | None = ..., drafter: str | AnyDrafter | None = ...,
    verifier: str | Verifier | None = ..., policy: str | Policy | None = ..., seed: int | None = ..., loop: str = ...,
    watch: Watch | None = ..., common_noise: bool = ..., prefix_cache: PrefixCache | None = ..., **fields: Any,
) -> list[Generation]: ...  # fmt: skip
def generate(
    model: Model, prompt: PromptLike | Seq[PromptLike], *, max_tokens: int | None = None,
    sampling: SamplingParams | Seq[SamplingParams] | None = None, drafter: str | AnyDrafter | None = None,
    verifier: str | Verifier | None = None, policy: str | Policy | None = None, seed: int | None = None,
    loop: str = "jit", watch: Watch | None = None, common_noise: bool = False,
    prefix_cache: PrefixCache | None = None, **fields: Any,
) -> Generation | list[Generation]:  # fmt: skip
    """Generates a continuation of one prompt, or of each prompt of a list in one batch.

    Args:
        model: from `load`. With an automatic width (docs/fixed_width.md) as wide as the drafts need: the text is plain
            decoding's on `model.holding(rows of a verification)`.
        prompt: text, token ids, or a chat (a list of {"role", "content"}); a list of texts or of id lists is a batch.
        max_tokens: most tokens to generate; wins over the field of `sampling`.
        sampling: default greedy; for a list of prompts it may be a list with an entry for each.
        drafter: a registered name, a `Drafter`, the spec of one (`get_drafter`), or None for plain decoding.
        verifier: a registered name or a `Verifier`; by default the first lossless one that fits the drafter.
        policy: a registered name or a `Policy`, how much is drafted in a round; by default as the drafter's options
            say, or as pays on this machine.
        seed: of the noise; one `sampling` for all prompts may hold it instead. None draws a new one. Each prompt of a
            list has a seed of its own, made of this one and its place (`engine.noise.seed_at`); the first has this one.
            The result says which it was: with it the prompt alone gives the same text. In a list of `sampling` a seed
            is that prompt's own, whatever its place.
        loop: "jit", the whole decode in one program; or "host", a program a stage: slower, the same tokens, and the
            counters have the time of each stage.
        watch: called with every speculative round (`runtime.loops.RoundView`); the loop is the host's then.
        common_noise: all prompts have the seed itself, to compare them draw by draw: equal prompts give equal texts,
            and texts of unlike ones correlate.
        prefix_cache: texts that were read before, of which a prompt that begins alike reads the rest alone; the text
            and its bits stay. A batch does not use it.
        fields: further fields of `SamplingParams`, which win over `sampling`; and the words of vLLM, Hugging Face and
            llama.cpp for all of these, such as `sampling_params`, `speculative_config`, `assistant_model`,
            `prompt_lookup_num_tokens`, `max_new_tokens` and `do_sample` (`support.neighbours.WORDS`).

    Returns:
        A `Generation`; a list of them for a list of prompts, and for n > 1 (n for each prompt).

    Raises:
        UserError: a mistake in any of these, in one line.
    """
    if not isinstance(common_noise, bool):
        raise UserError(f"common_noise={shown(common_noise)} must be true or false")
    _check_cache(prefix_cache)
    said = {"sampling": sampling, "max_tokens": max_tokens, "drafter": drafter, "verifier": verifier, "policy": policy}
    sampling, max_tokens, drafter, verifier, policy, fields = _understood(said, fields)
    prompts, many = _prompts(prompt)
    if isinstance(sampling, list | tuple):
        if not many or len(sampling) != len(prompts):
            given = f"{len(prompts)} prompts" if many else "one prompt that is in no list"
            raise UserError(f"sampling is a list of {len(sampling)} for {given}: give one for each, or one for all")
        every = [_params(model, one, max_tokens, fields) for one in sampling]
    else:
        every = [_params(model, sampling, max_tokens, fields)] * len(prompts)
    hottest = max(every, key=lambda p: 0.0 if p.greedy else p.temperature)
    batch = sum(params.num_sequences for params in every)
    model, method = ready(MethodSpec(drafter, verifier, policy, sampling=hottest), model, batch=batch)
    shared = every if isinstance(sampling, list | tuple) else every[0]
    groups = requests(model, prompts, shared, seed, common_noise=common_noise)
    sequences = [sequence for group in groups for sequence in group]
    noting = any(s.params.stop for s in sequences)
    session = Session(model, sequences, method, noting=noting, loop=loop, watch=watch, prefix_cache=prefix_cache)
    found = iter(generations(session, decode(session)))
    session.keep()
    grouped = zip(groups, every, strict=True)
    out = [g for group, params in grouped for g in best_of(list(itertools.islice(found, len(group))), params)]
    return out if many or len(out) > 1 else out[0]


def stream(
    model: Model, prompt: PromptLike, *, max_tokens: int | None = None, sampling: SamplingParams | None = None,
    drafter: str | AnyDrafter | None = None, verifier: str | Verifier | None = None,
    policy: str | Policy | None = None, seed: int | None = None, rounds: int = 4,
    prefix_cache: PrefixCache | None = None, **fields: Any,
) -> Stream:  # fmt: skip
    """`generate` for one prompt, as an iterator over text pieces (never half a character). See `Stream`.

    A piece is the text of `rounds` rounds: 1 gives text as soon as it is there, more cost less. `.tokens()` of the
    result gives it token by token.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= NOTED_ROUNDS:
        raise UserError(f"rounds={rounds!r} must be a whole number from 1 to {NOTED_ROUNDS}")
    _check_cache(prefix_cache)
    said = {"sampling": sampling, "max_tokens": max_tokens, "drafter": drafter, "verifier": verifier, "policy": policy}
    sampling, max_tokens, drafter, verifier, policy, fields = _understood(said, fields)
    params = _params(model, sampling, max_tokens, fields)
    prompts, many = _prompts(prompt)
    if many or params.num_sequences > 1:
        raise UserError("stream takes one prompt and n=1; use generate for more")
    model, method = ready(MethodSpec(drafter, verifier, policy, sampling=params), model)
    [[sequence]] = requests(model, prompts, params, seed)
    return Stream(Session(model, [sequence], method, noting=bool(params.stop), prefix_cache=prefix_cache), rounds)


def _check_cache(given: object) -> None:
    if not isinstance(given, PrefixCache | None):
        raise UserError(f"prefix_cache={shown(given)} must be a specsparse.PrefixCache, one for all calls")


def _understood(said: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments that are said by name, in their order, and the further fields, from anybody's words."""
    found = {**said, **fields}
    if WORDS.keys() & fields:
        found = understood({name: value for name, value in found.items() if value is not None or name in fields})
    if found.get("policy") is not None and found.get("drafter") in (None, "none"):
        raise UserError(f"policy={shown(found['policy'])} needs a drafter: give drafter=prompt_lookup, or leave it out")
    out = (*(found.pop(name, None) for name in said), found)
    own = [*{**options_of(SamplingParams), **said}]
    if name := next((name for name in found if name not in own), None):
        theirs = [word for word, meant in WORDS.items() if meant.whose and meant.here.partition(".")[0] != "load"]
        near = difflib.get_close_matches(name, [*own, *theirs], n=1, cutoff=0.6)
        raise UserError(f"unknown argument {name!r}{nearest(name, near or own)}")
    return out


def _params(
    model: Model, sampling: SamplingParams | None, max_tokens: int | None, fields: Mapping[str, object]
) -> SamplingParams:
    """`sampling`, or greedy for None, with `max_tokens` and `fields` in place of its own."""
    refuse({
        f"the first argument is a Model, from specsparse.load(...), not {type(model).__name__}":
            not isinstance(model, Model),
        f"sampling must be SamplingParams, not {type(sampling).__name__}":
            not isinstance(sampling, SamplingParams | None),
    })  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=None) if sampling is None else sampling
    if max_tokens is not None:
        fields = {**fields, "max_tokens": max_tokens}
    return params.merged(**fields) if fields else params


def _prompts(prompt: PromptLike | Seq[PromptLike]) -> tuple[list[PromptLike], bool]:
    """The prompts, and whether a list of them was given. A list of integers or of chat messages is one prompt."""
    if isinstance(prompt, str | np.ndarray):
        return [prompt], False
    if not isinstance(prompt, Seq):
        raise UserError(f"a prompt is a text, token ids or a chat, not {type(prompt).__name__}")
    many = len(prompt) > 0 and isinstance(prompt[0], str | Seq | np.ndarray)
    prompts: list[Any] = list(prompt) if many else [prompt]
    return prompts, many
