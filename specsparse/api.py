"""What notebooks use: load a model, generate, stream."""

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np

from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.stopping import TokenText
from specsparse.errors import UserError
from specsparse.powerinfer.ffn.fewer import sparse_twin
from specsparse.runtime import hostloop
from specsparse.runtime.hostloop import Watch
from specsparse.runtime.load import load
from specsparse.runtime.metrics import Counters
from specsparse.runtime.session import ALL_ROUNDS, NOTED_ROUNDS, Method, Sequence, Session
from specsparse.speculative.base import Drafter, Verifier
from specsparse.speculative.drafters.plan import DrafterPlan, MakeModel
from specsparse.speculative.drafters.registry import get_drafter
from specsparse.speculative.drafters.with_policy import PolicyReport
from specsparse.speculative.method import choose_verifier
from specsparse.speculative.origins import PLAIN, Origin, to_html
from specsparse.support import notebook

__all__ = ["Generation", "GenerationStats", "Model", "SamplingParams", "Stream", "generate", "load", "stream"]

_SHOWN = 80
"""Characters of a text in a repr."""
LOOPS = ("jit", "host")


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counters and seconds of one generation; the seconds of a batch are those of the whole batch.

    Both end with the round that wrote the last token of the text (of a batch, of the last text), also where a stop
    string was found some rounds later.

    Attributes:
        counters: see `specsparse.runtime.metrics`; their times are this sequence's share of a batch's.
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


@dataclasses.dataclass(frozen=True, repr=False)
class Generation:
    """What was generated. A notebook shows the text on colours that tell where each token came from.

    Attributes:
        token_ids: with the stop token, if one ended it.
        text: without the stop token or stop string, unless `include_stop_str_in_output`.
        logprobs: one entry a token if `SamplingParams.logprobs` is set, else None.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or the id of `stop_token_ids` that ended it; else None (vLLM's rule).
        stats: counters and times.
        prompt_token_ids: the prompt as it was fed.
        prompt_logprobs: entries for the prompt's tokens (None for the first) if asked for, else None.
        token_texts: what each token adds to `text`; () without `detokenize`. A token that ends inside a character adds
            nothing, the one that completes the character adds it.
        origins: where each token came from, None for plain decoding.
        seed: of the noise that drew it.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str
    stats: GenerationStats
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    token_texts: tuple[str, ...] = ()
    origins: tuple[Origin, ...] | None = None
    seed: int = 0
    stop_reason: str | int | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens over the seconds of decoding them, prompt and compiling excluded; None without time.

        Of a batch, those seconds are of the whole batch.
        """
        return self.stats.decode_tokens / self.stats.decode_s if self.stats.decode_s else None

    def __str__(self) -> str:
        """The text."""
        return self.text

    def __repr__(self) -> str:
        """The beginning of the text, then how many tokens it has and why it ended, in one line."""
        text = self.text if len(self.text) <= _SHOWN else self.text[:_SHOWN] + "…"
        return f"Generation({text!r}, {len(self.token_ids)} tokens, finish_reason={self.finish_reason!r})"

    def _repr_html_(self) -> str:
        """The text; each token on the colour of its origin, drafted ones the darker the later in their draft."""
        if self.origins is None or not self.token_texts:
            return notebook.block(notebook.span(self.text))
        return to_html(zip(self.token_texts, self.origins, strict=True))


def generate(
    model: Model,
    prompt: Any,
    *,
    max_tokens: int | None = None,
    sampling: SamplingParams | Seq[SamplingParams] | None = None,
    drafter: str | Drafter | DrafterPlan | None = None,
    verifier: str | Verifier | None = None,
    seed: int | None = None,
    loop: str = "jit",
    watch: Watch | None = None,
    **fields: Any,
) -> Generation | list[Generation]:
    """Generates a continuation of one prompt, or of each prompt of a list in one batch.

    Args:
        model: from `load`.
        prompt: text, token ids, or a chat (a list of {"role", "content"}); a list of texts or of id lists is a batch.
        max_tokens: most tokens to generate; wins over the field of `sampling`.
        sampling: default greedy; for a list of prompts it may be a list with an entry for each.
        drafter: a registered name, a `Drafter`, a plan of one (`get_drafter`), or None for plain decoding.
        verifier: a registered name or a `Verifier`; by default the first lossless one that fits the drafter.
        seed: of the noise, where `sampling.seed` is None; None draws a new one. The result says which it was.
        loop: "jit", the whole decode in one program; or "host", a program a stage: slower, the same tokens, and the
            counters have the time of each stage.
        watch: called with every speculative round (`runtime.hostloop.RoundView`); the loop is the host's then.
        fields: further fields of `SamplingParams`, which win over `sampling`.

    Returns:
        A `Generation`; a list of them for a list of prompts, and for n > 1 (n for each prompt).

    Raises:
        UserError: a mistake in any of these, in one line.
    """
    prompts, many = _prompts(prompt)
    every = _every_params(model, sampling, max_tokens, fields, len(prompts), many)
    method = make_method(model, drafter, verifier, max(every, key=lambda p: 0.0 if p.greedy else p.temperature))
    drawn = _seed(seed)
    groups = [_sequences(prompt_ids(model, p, params), params, drawn) for p, params in zip(prompts, every, strict=True)]
    sequences = [sequence for group in groups for sequence in group]
    if loop not in LOOPS:
        raise UserError(f"loop={loop!r} must be one of {', '.join(LOOPS)}")
    session = Session(model, sequences, method, noting=any(s.params.stop for s in sequences))
    if loop == "host" or watch or model.stepped:
        texts = decode(session, partial(hostloop.run, session, watch=watch), rounds=1)
    else:
        texts = decode(session, session.advance)
    found = iter(_generations(session, texts))
    grouped = zip(groups, every, strict=True)
    out = [g for group, params in grouped for g in _best(list(itertools.islice(found, len(group))), params)]
    return out if many or len(out) > 1 else out[0]


def _sequences(ids: np.ndarray, params: SamplingParams, seed: int) -> list[Sequence]:
    """The completions to draw for a prompt. Log probabilities are kept where the best of them are to be chosen."""
    ranked = params.merged(logprobs=0) if params.num_sequences > params.n and params.logprobs is None else params
    own = seed if params.seed is None else params.seed
    return [Sequence(ids, ranked, own, sample) for sample in range(params.num_sequences)]


class Stream(Iterator[str]):
    """Text pieces as they come; `generation` is set when the text has ended."""

    def __init__(self, session: Session, rounds: int):
        self._session, self._rounds = session, rounds
        self.generation: Generation | None = None
        self._groups = self._run()

    def __next__(self) -> str:
        while True:
            if text := "".join(piece for piece, _ in next(self._groups)):
                return text

    def marked(self) -> Iterator[tuple[str, Origin]]:
        """The same text token by token, each piece with where it came from."""
        return itertools.chain.from_iterable(self._groups)

    def tokens(self) -> Iterator[str]:
        """The same text token by token: one piece for each token that adds to it, also of an accepted draft."""
        return (piece for piece, _ in self.marked())

    def _run(self) -> Iterator[list[tuple[str, Origin]]]:
        """What may be shown after each few rounds."""
        session, params = self._session, self._session.sequences[0].params
        text = TokenText(session.model.tokenizer, params)
        while not text.ended:
            if session.finish[0] == Finish.RUNNING:
                session.advance(self._rounds)
            pieces = _read(session, {0: text})[0]
            first = pieces[0][0] if pieces else text.count
            origins = session.origins(first)
            if params.detokenize:
                yield [(piece, PLAIN if origins is None else origins[0][i - first]) for i, piece in pieces]
        self.generation = _generations(session, {0: text})[0]


def stream(
    model: Model,
    prompt: Any,
    *,
    max_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    drafter: str | Drafter | DrafterPlan | None = None,
    verifier: str | Verifier | None = None,
    seed: int | None = None,
    rounds: int = 4,
    **fields: Any,
) -> Stream:
    """`generate` for one prompt, as an iterator over text pieces (never half a character). See `Stream`.

    A piece is the text of `rounds` rounds: 1 gives text as soon as it is there, more cost less. `.tokens()` of the
    result gives it token by token.
    """
    if not isinstance(rounds, int) or not 1 <= rounds <= NOTED_ROUNDS:
        raise UserError(f"rounds={rounds!r} must be a whole number from 1 to {NOTED_ROUNDS}")
    params = _params(model, sampling, max_tokens, fields)
    prompts, many = _prompts(prompt)
    if many or params.num_sequences > 1:
        raise UserError("stream takes one prompt and n=1; use generate for more")
    method = make_method(model, drafter, verifier, params)
    [sequence] = _sequences(prompt_ids(model, prompts[0], params), params, _seed(seed))
    return Stream(Session(model, [sequence], method, noting=bool(params.stop)), rounds)


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


def _every_params(
    model: Model, sampling: Any, max_tokens: int | None, fields: dict, count: int, many: bool
) -> list[SamplingParams]:
    """The parameters of each prompt: the same for all, or one of a list each."""
    if not isinstance(sampling, list | tuple):
        return [_params(model, sampling, max_tokens, fields)] * count
    if not many or len(sampling) != count:
        prompts = f"{count} prompts" if many else "one prompt that is in no list"
        raise UserError(f"sampling is a list of {len(sampling)} for {prompts}: give one for each, or one for all")
    return [_params(model, one, max_tokens, fields) for one in sampling]


def _seed(seed: Any) -> int:
    """The seed, or a new one for None."""
    if seed is None:
        return secrets.randbits(32)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise UserError(f"seed={seed!r} must be a whole number, or None for a new one")
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


def decode(session: Session, advance: Callable[[int], None], *, rounds: int = NOTED_ROUNDS) -> dict[int, TokenText]:
    """Runs a session to its end.

    Args:
        session: one that is `noting` where there are stop strings.
        advance: runs so many of its rounds.
        rounds: between two looks for stop strings.

    Returns:
        The texts of the sequences with stop strings, by index.
    """
    texts = {b: TokenText(session.model.tokenizer, s.params) for b, s in enumerate(session.sequences) if s.params.stop}
    if not texts:
        advance(ALL_ROUNDS)
    while Finish.RUNNING in session.finish:
        advance(rounds)
        _read(session, texts)
    return texts


def _read(session: Session, texts: dict[int, TokenText]) -> dict[int, list[tuple[int, str]]]:
    """Takes new tokens into the texts, and ends the sequences where a stop string was found; new pieces by index."""
    tokens, finish = _text_tokens(session), session.finish
    new = {b: text for b, text in texts.items() if not text.ended}
    pieces = {b: t.push(tokens[b][t.count :], last=finish[b] != Finish.RUNNING) for b, t in new.items()}
    if session.noting:
        session.end({b: text.count for b, text in new.items() if text.found})
    return pieces


def _text_tokens(session: Session) -> list[np.ndarray]:
    """Tokens that make text, by sequence: a stop id at the end is left out, unless it is asked for."""
    stop_ids, out = np.asarray(session.job.stop_ids), []
    for tokens, finish, sequence, ids in zip(
        session.tokens(), session.finish, session.sequences, stop_ids, strict=True
    ):
        by_id = finish == Finish.STOP and len(tokens) and tokens[-1] in ids
        out.append(tokens[:-1] if by_id and not sequence.params.include_stop_str_in_output else tokens)
    return out


def _generations(session: Session, texts: dict[int, TokenText]) -> list[Generation]:
    """Results of all sequences. What is on the device is fetched once."""
    finish, tokens, shown, counters = session.finish, session.tokens(), _text_tokens(session), session.counters()
    policies = session.policies() or [None] * len(tokens)
    scores = None if session.state.scores is None else tuple(np.asarray(a) for a in session.state.scores)
    origins = session.origins() or [None] * len(tokens)
    out = []
    for b, sequence in enumerate(session.sequences):
        params = sequence.params
        if finish[b] == Finish.FAILED:
            raise UserError(
                f"{session.model.path}: the model's logits after {len(tokens[b])} tokens hold NaN or allow no token"
            )
        text = texts.get(b) or TokenText(session.model.tokenizer, params)
        if not text.ended:
            text.push(shown[b], last=True)
        after = [""] * (len(tokens[b]) - text.count)  # a stop token
        stats = GenerationStats(
            counters=counters[b],
            load_s=session.model.load_s,
            compile_s=session.compile_s,
            prefill_s=session.prefill_s,
            prefill_tokens=len(sequence.prompt) - 1,
            decode_s=session.decode_s,
            decode_tokens=len(tokens[b]),
            policy=policies[b],
        )
        generation = Generation(
            token_ids=tuple(tokens[b].tolist()),
            text=text.text if params.detokenize else "",
            logprobs=None if scores is None else _logprobs(sequence, [a[b] for a in scores], tokens[b]),
            finish_reason="stop" if finish[b] == Finish.STOP else "length",
            stats=stats,
            prompt_token_ids=tuple(sequence.prompt.tolist()),
            prompt_logprobs=_prompt_logprobs(session, sequence),
            token_texts=(*text.texts, *after) if params.detokenize else (),
            origins=origins[b],
            seed=sequence.seed,
            stop_reason=text.found or _stop_id(finish[b], tokens[b], params),
        )
        out.append(generation)
    return out


def _stop_id(finish: Finish, tokens: np.ndarray, params: SamplingParams) -> int | None:
    """The id of `stop_token_ids` that ended the tokens."""
    last = int(tokens[-1]) if finish == Finish.STOP and len(tokens) else None
    return last if last in params.stop_token_ids else None


def _logprobs(sequence: Sequence, scores: Seq[np.ndarray], tokens: np.ndarray) -> tuple[TokenLogprobs, ...] | None:
    """From one sequence's rows of `DecodeState.scores`."""
    asked, start = sequence.params.logprobs, len(sequence.prompt)
    if asked is None:
        return None
    chosen, rank, top, ids = scores
    keep = top.shape[1] if asked == -1 else asked
    return tuple(
        TokenLogprobs(
            int(t), float(chosen[i]), int(rank[i]), tuple(zip(ids[i, :keep].tolist(), top[i, :keep].tolist()))
        )
        for i, t in enumerate(tokens, start)
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
