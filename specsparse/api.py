"""What notebooks use: load a model, generate, stream."""

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np

from specsparse import hostloop
from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.params import SamplingParams
from specsparse.errors import UserError
from specsparse.hostloop import Watch
from specsparse.metrics import Counters
from specsparse.powerinfer.twin import sparse_twin
from specsparse.runtime.load import load
from specsparse.session import ALL_ROUNDS, Method, Sequence, Session
from specsparse.speculative.base import Drafter, Verifier
from specsparse.speculative.drafters.plan import DrafterPlan, MakeModel
from specsparse.speculative.drafters.registry import get_drafter
from specsparse.speculative.drafters.with_policy import PolicyReport
from specsparse.speculative.method import choose_verifier
from specsparse.stopping import TextStop

__all__ = ["Generation", "GenerationStats", "Model", "SamplingParams", "Stream", "generate", "load", "stream"]

_ROUNDS_BETWEEN_STOP_CHECKS = 16
_ROUNDS_PER_PIECE = 4
LOOPS = ("jit", "host")


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counters and seconds of one generation; the seconds of a batch are those of the whole batch.

    Attributes:
        counters: see `specsparse.metrics`.
        load_s: loading the model.
        compile_s: compiling programs that this call was the first to need.
        prefill_s, prefill_tokens: the prompt, without its last token.
        decode_s, decode_tokens: everything after it.
        policy: what the draft-length policy did, or None.
    """

    counters: Counters
    load_s: float
    compile_s: float
    prefill_s: float
    prefill_tokens: int
    decode_s: float
    decode_tokens: int
    policy: PolicyReport | None = None


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of one token under the model itself.

    Attributes:
        token_id, logprob, rank: of the token; rank 1 is the most likely.
        top: (token id, log probability) of the most likely tokens.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
        token_ids: with the stop token, if one ended it.
        text: without the stop token or stop string, unless `include_stop_str_in_output`.
        logprobs: one entry a token if `SamplingParams.logprobs` is set, else None.
        finish_reason: "stop" or "length".
        stats: counters and times.
        prompt_token_ids: the prompt as it was fed.
        prompt_logprobs: entries for the prompt's tokens (None for the first) if asked for, else None.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str
    stats: GenerationStats
    prompt_token_ids: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = dataclasses.field(default=None, repr=False)


def generate(
    model: Model,
    prompt: Any,
    *,
    max_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    drafter: str | Drafter | DrafterPlan | None = None,
    verifier: str | Verifier | None = None,
    seed: int = 0,
    loop: str = "jit",
    watch: Watch | None = None,
    **fields: Any,
) -> Generation | list[Generation]:
    """Generates a continuation of one prompt, or of each prompt of a list in one batch.

    Args:
        model: from `load`.
        prompt: text, token ids, or a chat (a list of {"role", "content"}); a list of texts or of id lists is a batch.
        max_tokens: most tokens to generate; wins over the field of `sampling`.
        sampling: default greedy.
        drafter: a registered name, a `Drafter`, a plan of one (`get_drafter`), or None for plain decoding.
        verifier: a registered name or a `Verifier`; by default the first lossless one that fits the drafter.
        seed: of the noise, where `sampling.seed` is None.
        loop: "jit", the whole decode in one program; or "host", a program a stage: slower, the same tokens, and the
            counters have the time of each stage.
        watch: called with every speculative round (`hostloop.RoundView`); the loop is the host's then.
        fields: further fields of `SamplingParams`, which win over `sampling`.

    Returns:
        A `Generation`; a list of them for a list of prompts, and for n > 1 (n for each prompt).

    Raises:
        UserError: a mistake in any of these, in one line.
    """
    params = _params(model, sampling, max_tokens, fields)
    prompts, many = _prompts(prompt)
    method = make_method(model, drafter, verifier, params)
    ids = [prompt_ids(model, p, params) for p in prompts]
    count = params.num_sequences
    base = _seed(seed) if params.seed is None else params.seed
    ranked = params.merged(logprobs=0) if count > params.n and params.logprobs is None else params
    sequences = [Sequence(i, ranked, base, sample) for i in ids for sample in range(count)]
    if loop not in LOOPS:
        raise UserError(f"loop={loop!r} must be one of {', '.join(LOOPS)}")
    session = Session(model, sequences, method)
    stepped = loop == "host" or watch or model.stepped
    _decode(session, partial(hostloop.run, session, watch=watch) if stepped else session.advance)
    out = [_generation(session, b) for b in range(len(sequences))]
    out = [g for start in range(0, len(out), count) for g in _best(out[start : start + count], params)]
    return out if many or params.n > 1 else out[0]


class Stream(Iterator[str]):
    """Text pieces as they come; `generation` is set when the text has ended."""

    def __init__(self, session: Session):
        self._session = session
        self.generation: Generation | None = None
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self) -> Iterator[str]:
        session, params = self._session, self._session.sequences[0].params
        decoder, stop = session.model.tokenizer.stream(skip_special=params.skip_special_tokens), TextStop(params)
        shown = 0
        while not stop.found and session.finish[0] == Finish.RUNNING:
            session.advance(_ROUNDS_PER_PIECE)
            tokens = _text_tokens(session, 0)
            piece = stop.push("".join(decoder.push(int(t)) for t in tokens[shown:]))
            shown = len(tokens)
            if piece and params.detokenize:
                yield piece
        rest = "" if stop.found else stop.push(decoder.flush()) + stop.flush()
        if rest and params.detokenize:
            yield rest
        if stop.found:
            session.end(0)
        self.generation = _generation(session, 0)


def stream(
    model: Model,
    prompt: Any,
    *,
    max_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    drafter: str | Drafter | DrafterPlan | None = None,
    verifier: str | Verifier | None = None,
    seed: int = 0,
    **fields: Any,
) -> Stream:
    """`generate` for one prompt, as an iterator over text pieces (never half a character). See `Stream`."""
    params = _params(model, sampling, max_tokens, fields)
    prompts, many = _prompts(prompt)
    if many or params.num_sequences > 1:
        raise UserError("stream takes one prompt and n=1; use generate for more")
    method = make_method(model, drafter, verifier, params)
    base = _seed(seed) if params.seed is None else params.seed
    return Stream(Session(model, [Sequence(prompt_ids(model, prompts[0], params), params, base)], method))


def make_method(
    model: Model, drafter: str | Drafter | DrafterPlan | None, verifier: str | Verifier | None, params: SamplingParams
) -> Method:
    """The method of a drafter and a verifier, refused where the pair does not keep its promise.

    A drafter that needs a model is bound to `model` here; its draft model is loaded the first time.
    """
    if isinstance(drafter, str) and drafter == "none":
        drafter = None
    if drafter is None:
        if verifier is not None:
            raise UserError("a verifier needs a drafter: give drafter=prompt_lookup, or leave the verifier out")
        return Method()
    drafter = get_drafter(drafter) if isinstance(drafter, str) else drafter
    if not isinstance(drafter, Drafter | DrafterPlan):
        raise UserError(f"drafter must be a registered name or a Drafter, not {type(drafter).__name__}")
    temperature = 0.0 if params.greedy else params.temperature
    verifier = choose_verifier(drafter, verifier, temperature=temperature)
    if isinstance(drafter, Drafter):
        return Method(drafter, verifier)
    if drafter not in model.drafters:
        if not drafter.on_mesh:
            model.check_whole("the drafter with these options")
        model.drafters[drafter] = drafter.bind(model, MakeModel(partial(_load_draft, model), sparse_twin))
    bound = model.drafters[drafter]
    return Method(bound.drafter, verifier, bound.weights)


def _load_draft(target: Model, spec: str) -> Model:
    """A draft model beside its target: on the same kernels and, of a mesh, on every device."""
    draft = load(spec, backend=target.kernels.name, kv_dtype=target.kv_dtype)
    draft.params = target.everywhere(draft.params)
    return draft


def _params(model: Model, sampling: SamplingParams | None, max_tokens: int | None, fields: dict) -> SamplingParams:
    if not isinstance(model, Model):
        raise UserError(f"the first argument is a Model, from specsparse.load(...), not {type(model).__name__}")
    if not isinstance(sampling, SamplingParams | None):
        raise UserError(f"sampling must be SamplingParams, not {type(sampling).__name__}")
    params = SamplingParams(temperature=0.0, max_tokens=None) if sampling is None else sampling
    if max_tokens is not None:
        fields = {**fields, "max_tokens": max_tokens}
    return params.merged(**fields) if fields else params


def _seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise UserError(f"seed={seed!r} must be a whole number")
    return int(seed)


def _prompts(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts and whether a list was given. A list of integers or of chat messages is one prompt."""
    if isinstance(prompt, str | np.ndarray):
        return [prompt], False
    if not isinstance(prompt, Seq):
        raise UserError(f"a prompt is a text, token ids or a chat, not {type(prompt).__name__}")
    if not prompt:
        raise UserError("the prompt is empty: at least one token is needed")
    if isinstance(prompt[0], str | Seq | np.ndarray):
        return list(prompt), True
    return [prompt], False


def prompt_ids(model: Model, prompt: Any, params: SamplingParams) -> np.ndarray:
    """Checked ids int32[n] of a text, a chat or ids. Texts may name special tokens; BOS is added as the file says."""
    tokenizer = model.tokenizer
    if isinstance(prompt, Seq) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
        prompt = tokenizer.apply_chat_template(prompt)
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
        if len(ids) > 1 and tokenizer.add_bos and ids[0] == ids[1] == tokenizer.bos_id:
            ids = ids[1:]  # a chat template has written BOS already
    else:
        ids = prompt
    keep = params.truncate_prompt_tokens
    if keep is not None:
        ids = ids[-(_room_for_prompt(model, params) if keep == -1 else keep) :]
    return model.check_ids(ids)


def _room_for_prompt(model: Model, params: SamplingParams) -> int:
    """Tokens that the context has beside the `max_tokens` to come, or beside one where they are not limited."""
    context = model.config.context_length
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted >= context:
        raise UserError(
            f"max_tokens={wanted} leaves truncate_prompt_tokens=-1 no prompt: the context holds {context} tokens"
        )
    return context - wanted


def _decode(session: Session, advance: Callable[[int], None]) -> None:
    """Runs a session to its end, looking for stop strings now and then where there are any."""
    if not any(s.params.stop for s in session.sequences):
        advance(ALL_ROUNDS)
        return
    while Finish.RUNNING in session.finish:
        advance(_ROUNDS_BETWEEN_STOP_CHECKS)
        for b, (s, f) in enumerate(zip(session.sequences, session.finish, strict=True)):
            if f == Finish.RUNNING and s.params.stop:
                stop = TextStop(s.params)
                stop.push(_text(session, b, session.tokens()[b]))
                if stop.found:
                    session.end(b)


def _text_tokens(session: Session, b: int) -> np.ndarray:
    """Tokens that make text: a stop id at the end is left out, unless it is asked for."""
    tokens, params = session.tokens()[b], session.sequences[b].params
    ended = session.finish[b] == Finish.STOP and len(tokens)
    by_id = ended and int(tokens[-1]) in set(np.asarray(session.job.stop_ids)[b].tolist())
    return tokens[:-1] if by_id and not params.include_stop_str_in_output else tokens


def _text(session: Session, b: int, tokens: np.ndarray) -> str:
    params = session.sequences[b].params
    return session.model.tokenizer.decode(
        (int(t) for t in tokens), skip_special=params.skip_special_tokens, continues=True
    )


def _cut_at_stop(session: Session, b: int) -> tuple[np.ndarray, str, bool]:
    """Tokens and text up to the first stop string, and whether there was one."""
    params, tokens = session.sequences[b].params, session.tokens()[b]
    if not params.detokenize:
        return tokens, "", False
    text = _text(session, b, _text_tokens(session, b))
    stop = TextStop(params)
    kept = stop.push(text)
    if not stop.found:
        return tokens, text, False
    decoder, seen = session.model.tokenizer.stream(skip_special=params.skip_special_tokens), ""
    for count, token in enumerate(tokens, 1):
        seen += decoder.push(int(token))
        if len(seen) >= stop.end:
            tokens = tokens[:count]
            break
    return tokens, kept, True


def _generation(session: Session, b: int) -> Generation:
    sequence, finish = session.sequences[b], session.finish[b]
    if finish == Finish.FAILED:
        raise UserError(
            f"{session.model.path}: the model's logits after {len(session.tokens()[b])} tokens hold NaN "
            "or allow no token"
        )
    tokens, text, stopped = _cut_at_stop(session, b)
    counters = dataclasses.replace(session.counters(b), num_emitted_tokens=len(tokens))
    stats = GenerationStats(
        counters=counters,
        load_s=session.model.load_s,
        compile_s=session.compile_s,
        prefill_s=session.prefill_s,
        prefill_tokens=len(sequence.prompt) - 1,
        decode_s=session.decode_s,
        decode_tokens=len(tokens),
        policy=session.policy(b),
    )
    return Generation(
        token_ids=tuple(int(t) for t in tokens),
        text=text,
        logprobs=_logprobs(session, b, tokens),
        finish_reason="stop" if stopped or finish == Finish.STOP else "length",
        stats=stats,
        prompt_token_ids=tuple(int(t) for t in sequence.prompt),
        prompt_logprobs=_prompt_logprobs(session, sequence),
    )


def _logprobs(session: Session, b: int, tokens: np.ndarray) -> tuple[TokenLogprobs, ...] | None:
    scores = session.state.scores
    asked = session.sequences[b].params.logprobs
    if scores is None or asked is None:
        return None
    start = len(session.sequences[b].prompt)
    rows = range(start, start + len(tokens))
    chosen, rank, top, ids = (np.asarray(a[b]) for a in scores)
    keep = top.shape[1] if asked == -1 else asked
    return tuple(
        TokenLogprobs(
            int(t), float(chosen[i]), int(rank[i]), tuple(zip(ids[i, :keep].tolist(), top[i, :keep].tolist()))
        )
        for t, i in zip(tokens, rows, strict=True)
    )


def _prompt_logprobs(session: Session, sequence: Sequence) -> tuple[TokenLogprobs | None, ...] | None:
    asked = sequence.params.prompt_logprobs
    if asked is None:
        return None
    logits = session.model.logits(sequence.prompt)[:-1].astype(np.float64)
    logits -= np.logaddexp.reduce(logits, axis=1, keepdims=True)
    out: list[TokenLogprobs | None] = [None]
    for row, token in zip(logits, sequence.prompt[1:], strict=True):
        best = np.argsort(-row, kind="stable")[: len(row) if asked == -1 else asked]
        rank = 1 + int((row > row[token]).sum())
        out.append(TokenLogprobs(int(token), float(row[token]), rank, tuple((int(i), float(row[i])) for i in best)))
    return tuple(out)


def _best(group: list[Generation], params: SamplingParams) -> list[Generation]:
    """The n most likely of best_of completions, the likeliest first."""
    if len(group) <= params.n:
        return group
    total = [sum(t.logprob for t in g.logprobs) for g in group]
    order = sorted(range(len(group)), key=lambda i: -total[i])
    best = [group[i] for i in order[: params.n]]
    return [dataclasses.replace(g, logprobs=None) for g in best] if params.logprobs is None else best
