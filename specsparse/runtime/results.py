"""Results of a session: texts, as they come or at its end, tokens, log probabilities, counters and times."""

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq

import numpy as np

from specsparse.engine.generate import Finish
from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.stopping import TokenText
from specsparse.errors import GenerationFailed
from specsparse.runtime.metrics import Counters
from specsparse.runtime.session import Request, Session
from specsparse.speculative.policies.base import PolicyReport
from specsparse.speculative.token_sources import PLAIN, TokenSource, to_html
from specsparse.support import notebook

_SHOWN = 80  # characters of a text in a repr


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counters and seconds of one generation; the seconds of a batch are those of the whole batch.

    Both end with the round that wrote the last token of the text (of a batch, of the last text), even if a stop string
    was found some rounds later.

    Attributes:
        counters: see `specsparse.runtime.metrics`; their times are this sequence's share of a batch's.
        load_s: loading the model.
        compile_s: compiling programs that this call was the first to need.
        prefill_s, prefill_tokens: the prompt, without its last token.
        decode_s, decode_tokens: everything after it.
        policy: what the draft-length policy did, or None.
        drafts: drafted and accepted tokens of each round that drafted, if there were stop strings to look for; else
            None.
        cached_tokens: of the prompt's, those that a prefix cache had.
    """

    counters: Counters
    load_s: float
    compile_s: float
    prefill_s: float
    prefill_tokens: int
    decode_s: float
    decode_tokens: int
    policy: PolicyReport | None = None
    drafts: tuple[tuple[int, int], ...] | None = None
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log probability of one token under the model itself, its rank (1 is the most likely), and `top`, (token id, log
    probability) of the most likely tokens.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Generation:
    """A generated text. A notebook shows it on colours that tell where each token came from.

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
        token_sources: where each token came from, None for plain decoding.
        seed: of the noise that drew it: the prompt alone gives this text with it (of `n` completions, the first).
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str
    stats: GenerationStats
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    token_texts: tuple[str, ...] = ()
    token_sources: tuple[TokenSource, ...] | None = None
    seed: int = 0
    stop_reason: str | int | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens over the seconds of decoding them, prompt and compiling excluded; None without time.

        Of a batch, those seconds are of the whole batch.
        """
        return self.stats.decode_tokens / self.stats.decode_s if self.stats.decode_s else None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        """The beginning of the text, then how many tokens it has and why it ended, in one line."""
        text = self.text if len(self.text) <= _SHOWN else self.text[:_SHOWN] + "…"
        return f"Generation({text!r}, {len(self.token_ids)} tokens, finish_reason={self.finish_reason!r})"

    def _repr_html_(self) -> str:
        """The text; each token on the colour of its source, drafted ones the darker the later in their draft."""
        if self.token_sources is None or not self.token_texts:
            return notebook.block(notebook.span(self.text))
        return to_html(zip(self.token_texts, self.token_sources, strict=True))


def decode(session: Session) -> dict[int, TokenText]:
    """Runs a session, one that is `noting` if there are stop strings, to its end.

    Returns the texts of the sequences with stop strings, by index.
    """
    texts = {b: TokenText(session.model.tokenizer, s.params) for b, s in enumerate(session.sequences) if s.params.stop}
    if not texts:
        session.advance()
    while Finish.RUNNING in session.finish:
        session.advance(session.loop.rounds)
        read_texts(session, texts)
    return texts


def read_texts(session: Session, texts: dict[int, TokenText]) -> dict[int, list[tuple[int, str]]]:
    """Takes new tokens into the texts, and ends those with a stop string; new pieces by index."""
    tokens, finish = _text_tokens(session), session.finish
    new = {b: text for b, text in texts.items() if not text.ended}
    pieces = {b: t.push(tokens[b][t.count :], last=finish[b] != Finish.RUNNING) for b, t in new.items()}
    if session.noting:
        session.end({b: text.count for b, text in new.items() if text.found})
    return pieces


def _text_tokens(session: Session) -> list[np.ndarray]:
    """Tokens that make text, by sequence: a stop id at the end is left out, unless it is asked for."""
    stop_ids, finish, out = np.asarray(session.job.stop_ids), session.finish, []
    for b, tokens in enumerate(session.tokens()):
        by_id = finish[b] == Finish.STOP and len(tokens) and tokens[-1] in stop_ids[b]
        out.append(tokens[:-1] if by_id and not session.sequences[b].params.include_stop_str_in_output else tokens)
    return out


def generations(
    session: Session, texts: dict[int, TokenText], *, only: Collection[int] | None = None
) -> list[Generation]:
    """Results of all sequences, or of `only` some. Arrays on the device are fetched once."""
    finish, tokens, shown, counters = session.finish, session.tokens(), _text_tokens(session), session.counters()
    policies = session.policies() or [None] * len(tokens)
    scores = None if session.state.scores is None else tuple(np.asarray(a) for a in session.state.scores)
    token_sources, drafts = session.token_sources() or [None] * len(tokens), session.drafts()
    out = []
    for b, sequence in enumerate(session.sequences):
        if only is not None and b not in only:
            continue
        params = sequence.params
        text = texts.get(b) or TokenText(session.model.tokenizer, params)
        if not text.ended:
            text.push(shown[b], last=True)
        if finish[b] == Finish.FAILED:
            raise GenerationFailed(session.failure(b), text.text if params.detokenize else "")
        after = [""] * (len(tokens[b]) - text.count)  # a stop token
        last = int(tokens[b][-1]) if finish[b] == Finish.STOP and len(tokens[b]) else None
        stats = GenerationStats(
            counters=counters[b],
            load_s=session.model.load_s,
            compile_s=session.compile_s,
            prefill_s=session.times.prefill,
            prefill_tokens=len(sequence.prompt) - 1,
            decode_s=session.times.total,
            decode_tokens=len(tokens[b]),
            policy=policies[b],
            drafts=None if drafts is None else drafts[b],
            cached_tokens=session.cached,
        )
        made = Generation(
            token_ids=tuple(tokens[b].tolist()),
            text=text.text if params.detokenize else "",
            logprobs=None if scores is None else _logprobs(sequence, [a[b] for a in scores], tokens[b]),
            finish_reason="stop" if finish[b] == Finish.STOP else "length",
            stats=stats,
            prompt_token_ids=tuple(sequence.prompt.tolist()),
            prompt_logprobs=_prompt_logprobs(session, sequence),
            token_texts=(*text.texts, *after) if params.detokenize else (),
            token_sources=token_sources[b],
            seed=sequence.seed,
            stop_reason=text.found or (last if last in params.stop_token_ids else None),
        )
        out.append(made)
    return out


def logprobs_of(session: Session, b: int, first: int, last: int) -> tuple[TokenLogprobs, ...]:
    """The log probabilities of the tokens from `first` to before `last` that sequence b has generated; () if they were
    not asked for."""
    if session.state.scores is None:
        return ()
    scores = [np.asarray(a)[b] for a in session.state.scores]
    return _logprobs(session.sequences[b], scores, session.tokens()[b][:last], first) or ()


def _logprobs(
    sequence: Request, scores: Seq[np.ndarray], tokens: np.ndarray, first: int = 0
) -> tuple[TokenLogprobs, ...] | None:
    """Log probabilities out of one sequence's rows of `DecodeState.scores`, of its tokens from the `first` on."""
    asked, start = sequence.params.logprobs, len(sequence.prompt) + first
    if asked is None:
        return None
    chosen, rank, top, ids = scores
    keep = top.shape[1] if asked == -1 else asked
    return tuple(
        TokenLogprobs(
            int(t), float(chosen[i]), int(rank[i]), tuple(zip(ids[i, :keep].tolist(), top[i, :keep].tolist()))
        )
        for i, t in enumerate(tokens[first:], start)
    )


def _prompt_logprobs(session: Session, sequence: Request) -> tuple[TokenLogprobs | None, ...] | None:
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


def best_of(group: list[Generation], params: SamplingParams) -> list[Generation]:
    """The n most likely of best_of completions, the likeliest first."""
    if len(group) <= params.n:
        return group
    total = [sum(t.logprob for t in g.logprobs or ()) for g in group]
    order = sorted(range(len(group)), key=lambda i: -total[i])
    best = [group[i] for i in order[: params.n]]
    return [dataclasses.replace(g, logprobs=None) for g in best] if params.logprobs is None else best


class Stream(Iterator[str]):
    """Text pieces of one sequence as they come; `generation` is set when the text has ended."""

    def __init__(self, session: Session, rounds: int):
        self._session, self._rounds = session, rounds
        self.generation: Generation | None = None
        self._groups = self._run()

    def __next__(self) -> str:
        while True:
            if text := "".join(piece for piece, _ in next(self._groups)):
                return text

    def marked(self) -> Iterator[tuple[str, TokenSource]]:
        """The same text token by token, each piece with the source of its token."""
        return itertools.chain.from_iterable(self._groups)

    def tokens(self) -> Iterator[str]:
        """The same text token by token: one piece for each token that adds to it, also of an accepted draft."""
        return (piece for piece, _ in self.marked())

    def _run(self) -> Iterator[list[tuple[str, TokenSource]]]:
        session, params = self._session, self._session.sequences[0].params
        text = TokenText(session.model.tokenizer, params)
        while not text.ended:
            if session.finish[0] == Finish.RUNNING:
                session.advance(self._rounds)
            pieces = read_texts(session, {0: text})[0]
            first = pieces[0][0] if pieces else text.count
            sources = session.token_sources(first)
            if params.detokenize:
                yield [(piece, PLAIN if sources is None else sources[0][i - first]) for i, piece in pieces]
        session.keep()
        self.generation = generations(session, {0: text})[0]
