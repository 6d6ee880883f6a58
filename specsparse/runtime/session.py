"""A session decodes one batch: requests in, prompts into the cache, rounds on the device, tokens and counters out.

`requests` makes checked sequences of what a caller asks for; `runtime.results` reads texts off a session.
"""

import secrets
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specsparse.engine import generate, hosts
from specsparse.engine.cache import KVCache
from specsparse.engine.devices import compiled
from specsparse.engine.fixed_width import check_rows
from specsparse.engine.generate import DecodeState, Finish, Job
from specsparse.engine.model import Model, Program
from specsparse.engine.noise import seed_at, seed_words
from specsparse.engine.prefill import Chunk, chunk_rows, prefill
from specsparse.engine.pytree import Pytree
from specsparse.engine.sampling import pipeline
from specsparse.engine.sampling.params import SEEDS, SamplingConfig, SamplingParams, compile_params
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import ContextTooLong, UserError
from specsparse.runtime.loops import Note, RoundLog, Watch, loop_for, round_of
from specsparse.runtime.method import Method
from specsparse.runtime.metrics import Counters, Times
from specsparse.runtime.prefix_cache import PrefixCache, ReadText, applies, continued, shortened
from specsparse.speculative import token_sources
from specsparse.speculative.base import Drafted
from specsparse.speculative.policies.base import PolicyReport
from specsparse.speculative.token_sources import TokenSource
from specsparse.support.options import shown

ALL_ROUNDS = 2**30
PromptLike = str | np.ndarray | Seq[int] | Seq[Mapping[str, str]]
"""A text, token ids, or a chat: a list of {"role", "content"}."""


# Requests.


@dataclass(frozen=True)
class Request:
    """One sequence of a batch: a checked prompt int32[n], what to do with it, and where its noise comes from."""

    prompt: np.ndarray
    params: SamplingParams
    seed: int
    sample: int = 0


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a prompt's text, which may name special tokens; BOS is added once if the file says so."""
    ids = tokenizer.encode(text, add_special=True, parse_special=True)
    twice = len(ids) > 1 and tokenizer.add_bos and ids[0] == ids[1] == tokenizer.bos_id
    return ids[1:] if twice else ids  # a chat template has written BOS already


def prompt_ids(model: Model, prompt: PromptLike, params: SamplingParams) -> np.ndarray:
    """Checked ids int32[n] of a text, a chat or ids; texts as `text_ids` reads them. UserError: ids that the model does
    not have, none at all, or more than its context holds."""
    if isinstance(prompt, Seq) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
        prompt = model.tokenizer.apply_chat_template(prompt)
    ids = text_ids(model.tokenizer, prompt) if isinstance(prompt, str) else prompt
    keep = params.truncate_prompt_tokens
    if keep == -1:  # as many as fit beside the tokens to come
        context, wanted = model.config.context_length, 1 if params.max_tokens is None else params.max_tokens
        if wanted >= context:
            raise ContextTooLong(
                f"max_tokens={wanted} leaves truncate_prompt_tokens=-1 no prompt: the context holds {context} tokens"
            )
        keep = context - wanted
    return model.check_ids(ids if keep is None else ids[-keep:])


def seed_of(seed: object) -> int:
    """The seed, or a new one for None. UserError: no whole number of 64 bits."""
    if seed is None:
        return secrets.randbits(32)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not SEEDS.holds(int(seed)):
        raise UserError(f"seed={shown(seed)} must be a whole number of 64 bits, or None for a new one")
    return int(seed)


def requests(
    model: Model, prompts: Seq[PromptLike], sampling: SamplingParams | Seq[SamplingParams], seed: object = None, *,
    common_noise: bool = False,
) -> list[list[Request]]:  # fmt: skip
    """The completions to draw for each prompt of a batch, each with noise of its own.

    Log probabilities are kept if the best of several completions are to be chosen. UserError: as `prompt_ids` and
    `seed_of`.

    Args:
        sampling: for all prompts, and its seed wins over `seed`; or one for each, whose seed is that prompt's own.
        seed: of the batch: prompt i has `seed_at(seed, i)`. None draws a new one.
        common_noise: prompts share `seed` itself: as long as two texts agree, so do their next draws.
    """
    if isinstance(sampling, SamplingParams):
        seed = seed if sampling.seed is None else sampling.seed
        sampling = [sampling.merged(seed=None)] * len(prompts)
    shared, groups = seed_of(seed), []
    for place, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        own = shared if common_noise else seed_at(shared, place)
        own = own if params.seed is None else params.seed
        ids = prompt_ids(model, prompt, params)
        ranked = params.merged(logprobs=0) if params.num_sequences > params.n and params.logprobs is None else params
        groups.append([Request(ids, ranked, own, sample) for sample in range(params.num_sequences)])
    return groups


# The session.


class Session:
    """Decodes one batch. `advance` runs rounds; `tokens` and `finish` say how far it got. UserError: an unknown loop.

    Args:
        noting: whether counters are noted after each round, so that a text can end at any of its tokens.
        loop: "jit", all rounds in one program; or "host", a program a stage.
        watch: called with every speculative round; the loop is the host's then.
        prefix_cache: texts that were read before; `keep` adds this one.

    Attributes:
        job: what stays the same while the batch is decoded.
        sampling: how its distributions are made.
        params, draft_params: weights of the target and of the drafter.
        state: donated to each call.
        log: times and counters.
        compile_s: seconds of compiling, which no other time holds.
        cached: tokens of the prompt that the prefix cache had.
    """

    def __init__(
        self, model: Model, sequences: list[Request], method: Method, *, noting: bool = False, loop: str = "jit",
        watch: Watch | None = None, prefix_cache: PrefixCache | None = None,
    ):  # fmt: skip
        self.loop = loop_for(model, method, loop=loop, watch=watch)
        seeds = hosts.agreed([s.seed for s in sequences])  # each process has drawn its own
        sequences = [replace(s, seed=seed) for s, seed in zip(sequences, seeds, strict=True)]
        self.model, self.sequences, self.method, self.noting = model, sequences, method, noting
        self.compile_s = 0.0
        self.log = RoundLog()
        check_rows(method.max_nodes + 1, model.width)
        limits = np.array([self._limit(s) for s in sequences], np.int32)
        self.capacity = model.capacity_for(int(limits.max()) + model.room_for(method.max_nodes))
        self.params = model.params_for(self.capacity)
        self.draft_params = None if method.weights is None else model.everywhere(method.weights(self.capacity))
        self.sampling, self.job = self._job(limits)
        self.cached = 0
        self._hidden: jax.Array | None = None
        self._prefix_cache = prefix_cache
        self.state: DecodeState = model.everywhere(self._prefill(limits))

    def _limit(self, request: Request) -> int:
        """The length at which a sequence ends."""
        context, wanted = self.model.config.context_length, request.params.max_tokens
        return context if wanted is None else min(context, len(request.prompt) + wanted)

    def _job(self, limits: np.ndarray) -> tuple[SamplingConfig, Job]:
        """The sampling and the job of the sequences, which end at these lengths, int32[B]."""
        model, every = self.model, [s.params for s in self.sequences]
        eos_ids = model.tokenizer.stop_ids
        sampling, sampling_arrays = compile_params(
            every,
            vocab_size=model.config.vocab_size,
            encode=model.tokenizer.encode,
            eos_ids=sorted(eos_ids),
            context_limit=self.capacity,
        )
        stop_ids = [sorted({*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)}) for p in every]
        width = max(1, *map(len, stop_ids))
        job = Job(
            sampling=sampling_arrays,
            stop_ids=np.array([ids + [-1] * (width - len(ids)) for ids in stop_ids], np.int32),
            limit=limits,
            seed=np.stack([seed_words(s.seed) for s in self.sequences]),
            sample=np.array([s.sample for s in self.sequences], np.int32),
        )
        return sampling, model.everywhere(jax.device_put(job))  # `jnp.asarray` would compile one for each shape

    def clock(self) -> float:
        """Seconds on a clock that stands still while programs are compiled."""
        return time.perf_counter() - self.compile_s

    def call(self, key: Hashable, function: Callable, *args: Pytree, **how) -> Pytree:
        args = self.model.everywhere(args)
        return self.program(key, function, *args, **how)(*args)

    def program(
        self, key: Hashable, function: Callable, *args: Pytree, donate: tuple[int, ...] = (),
        compiled: Callable[..., Program] = compiled,
    ) -> Program:  # fmt: skip
        """A pure `function` compiled for arguments of these shapes, once; compiling is timed apart.

        Args:
            key: names what the function closes over.
            function: its first argument are weights.
            donate: places of the arguments that a call gives up.
            compiled: compiles; of functions that run the target's forward pass, `Devices.compile` does.
        """
        leaves, structure = jax.tree.flatten(args[1:])  # args[0] are weights
        key = (key, structure, tuple((jnp.shape(a), a.dtype) for a in leaves))

        def compile_it() -> Program:
            start = time.perf_counter()
            program = compiled(function, *args, donate=donate)
            self.compile_s += time.perf_counter() - start
            return program

        return self.model.programs.once(key, compile_it)

    def _fed(
        self, texts: Seq[np.ndarray], cache: KVCache, wants_hidden: bool | tuple[int, ...] = False
    ) -> tuple[list[jax.Array], KVCache]:
        """The hidden rows, by chunk, of texts int32[n] behind what each sequence has in the cache, and it with them."""
        forward = partial(generate.prefill_chunk, self.model.forward, hidden=wants_hidden)
        hidden, spent = [], 0.0

        def program(chunk: Chunk, cache: KVCache):
            nonlocal spent
            begun, args = self.clock(), (self.params, *chunk.arrays, cache)
            how = self.model.devices.compile
            out, cache = self.call(("prefill", wants_hidden), forward, *args, donate=(3,), compiled=how)
            cache.length.block_until_ready()
            spent += self.clock() - begun
            return out, cache

        for _, out, after in prefill(program, texts, cache):
            cache = after
            hidden.append(out)
        self.log.add(Times(prefill=spent))
        return hidden, cache

    def _prefill(self, limits: np.ndarray) -> DecodeState:
        """The state after all tokens of each prompt but the last, which the first round feeds. Texts that are kept are
        forgotten if this one has no room beside them."""
        prompts = [s.prompt for s in self.sequences]
        drafter, batch = self.method.drafter, len(prompts)
        lengths = np.array([len(p) for p in prompts], np.int32)
        tokens = np.zeros((batch, self.capacity), np.int32)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = ids
        wants_hidden = drafter is not None and drafter.wants_hidden
        try:
            cache, known = self.model.new_cache(batch, self.capacity), None
        except UserError:
            if self._prefix_cache is None or not self._prefix_cache.forget():
                raise
            cache, known = self.model.new_cache(batch, self.capacity), None
        kept = self._prefix_cache if applies(self.model, batch) else None
        if kept and (found := kept.find(self.model, prompts[0], wants_hidden)):
            self.cached, text = found
            known = text.hidden
            begun, held = self.clock(), np.array([self.cached], np.int32)
            cache = self.call(("continued",), continued, None, text.cache, cache, held, donate=(2,))
            self.log.add(Times(prefill=self.clock() - begun))
        hidden, cache = self._fed([p[self.cached : -1] for p in prompts], cache, wants_hidden)
        scores = self.sampling.logprobs
        state = DecodeState(
            tokens=jax.device_put(tokens),
            length=jax.device_put(lengths),
            finish=jax.device_put(np.where(lengths >= limits, np.int32(Finish.LENGTH), np.int32(Finish.RUNNING))),
            cache=cache,
            counters=generate.zero_counters(batch, self.method.max_nodes),
            history=None if self.sampling.raw else pipeline.init_history(self.sampling, prompts),
            scores=None if scores is None else generate.empty_scores(batch, self.capacity, scores),
        )
        if drafter is not None:
            if wants_hidden and known is not None:  # as many rows as without: `begin` is compiled for each number
                fed = int(lengths[0]) - 1
                rows = np.concatenate([known[:, : self.cached], *map(np.asarray, hidden)], axis=1)[:, :fed]
                hidden = [np.pad(rows, ((0, 0), (0, sum(chunk_rows(fed)) - fed), (0, 0)))]
            features = jnp.concatenate(hidden, axis=1) if wants_hidden and hidden else None
            self._hidden = features if kept else None

            def begin(weights, job, state, text, features):
                return round_of(self).init(weights, job, state, text=text, hidden=features)

            text, weights = self.read_text(state, None), (self.params, self.draft_params)
            begun = self.clock()
            key = ("init", drafter, self.method.policy)
            own, policy = self.call(key, begin, weights, self.job, state, text, features)
            jax.block_until_ready((own, policy))
            self.log.add(Times(prefill=self.clock() - begun))
            empty = jax.device_put(np.zeros((batch, self.capacity), token_sources.DTYPE))
            state = state._replace(drafter=own, policy=policy, token_sources=empty)
        return state

    def read_text(self, state: DecodeState, own: Pytree) -> Pytree:
        """The drafter's view of the committed text, or None if it reads no text."""
        drafter = round_of(self).drafter
        if not drafter.reads_text:
            return None
        text = drafter.read_text(own, np.asarray(state.tokens), np.asarray(state.length))
        return self.model.everywhere(jax.tree.map(jnp.asarray, text))

    def write_text(self, state: DecodeState, drafted: Drafted) -> Drafted:
        """A draft of a drafter that reads text, in the target's tokens."""
        drafted = round_of(self).drafter.write_text(drafted, np.asarray(state.tokens), np.asarray(state.length))
        return drafted._replace(draft=self.model.everywhere(jax.tree.map(jnp.asarray, drafted.draft)))

    def advance(self, max_rounds: int = ALL_ROUNDS) -> None:
        """Runs up to `max_rounds` rounds of every sequence that has not ended."""
        self.loop.advance(self, max_rounds)

    def keep(self) -> None:
        """Leaves what was read and written to the prefix cache, if the prompt was not there already. Without room for
        it, texts that are kept are forgotten."""
        prompt = self.sequences[0].prompt
        read = len(prompt) - 1 - self.cached
        if self._prefix_cache is None or not read or not applies(self.model, len(self.sequences)):
            return
        held = min(int(self.state.cache.length[0]), int(self.state.length[0]) - 1)
        tokens = np.asarray(self.state.tokens)[0, :held].copy()
        hidden = None if self._hidden is None else np.asarray(self._hidden)[:, : len(prompt) - 1]
        wants = self.method.drafter.wants_hidden if self.method.drafter is not None else False
        try:
            cache = shortened(self.state.cache, self.model.capacity_for(held))
        except UserError:
            self._prefix_cache.forget()
            return
        self._prefix_cache.keep(ReadText(self.model, tokens, cache, hidden, wants), len(prompt))

    def end(self, kept: Mapping[int, int]) -> None:
        """Says that the texts were looked at, and ends some after so many tokens (a stop string was found).

        Tokens, counters and policies of those end there: with the round that wrote the last of these tokens, which came
        since the call before. When all sequences have ended, so does the time, with the last round that a text needed.
        """
        self.log.end(kept)
        if kept:
            self.drop(kept)
        ended = Finish.RUNNING not in self.finish
        self.log.settle(int(self._ends().counters.rounds.max()) if ended else None)

    def drop(self, sequences: Collection[int]) -> None:
        """Ends some sequences as they are: nobody reads what would follow."""
        finish = np.array(self.state.finish)
        finish[list(sequences)] = Finish.STOP
        self.state = self.state._replace(finish=self.model.everywhere(jax.device_put(finish)))

    def admit(self, others: Mapping[int, Request]) -> None:
        """Begins other sequences in the places of some (continuous batching: Orca, OSDI 2022).

        What a prompt has in common with the beginning of the text in its place is not computed again. Only for plain
        decoding without log probabilities or a history; counters and times go on.
        """
        if not others:
            return
        state = self.state
        assert self.method.drafter is state.history is state.scores is None and not self.noting
        tokens, length, finish, held, limit = (
            np.array(a) for a in (state.tokens, state.length, state.finish, state.cache.length, self.job.limit)
        )
        texts = [tokens[0, :0]] * len(tokens)
        for b, new in others.items():
            n, limit[b] = len(new.prompt), self._limit(new)
            known = min(held[b], n - 1)
            held[b] = np.append(tokens[b, :known] != new.prompt[:known], True).argmax()
            texts[b] = new.prompt[held[b] : -1]
            tokens[b, :n], length[b], finish[b] = new.prompt, n, Finish.LENGTH if n >= limit[b] else Finish.RUNNING
        assert limit.max() <= self.capacity, "the cache is too short for the new sequences"
        self.sequences = [others.get(b, s) for b, s in enumerate(self.sequences)]
        self.sampling, self.job = self._job(limit)
        tokens, length, finish, held = self.model.everywhere(jax.device_put((tokens, length, finish, held)))
        _, cache = self._fed(texts, state.cache._replace(length=held))
        self.state = state._replace(tokens=tokens, length=length, finish=finish, cache=cache)

    @property
    def finish(self) -> list[Finish]:
        return [Finish(int(f)) for f in np.asarray(self.state.finish)]

    @property
    def times(self) -> Times:
        """Times of the whole batch; its stages if the host ran all rounds."""
        return self.log.times

    def tokens(self) -> list[np.ndarray]:
        return self._generated(self.state.tokens)

    def token_sources(self, first: int = 0) -> list[tuple[TokenSource, ...]] | None:
        """The source of each of these tokens, from the `first` on; None for plain decoding."""
        codes = self.state.token_sources
        return None if codes is None else [token_sources.read(codes_n[first:]) for codes_n in self._generated(codes)]

    def failure(self, b: int) -> str:
        """Why sequence b FAILED, in one line."""
        tokens = np.asarray(self.state.tokens)[b, : int(self.state.length[b])]
        why = None if self.method.drafter is None else self.method.drafter.failure(tokens)
        written = len(tokens) - len(self.sequences[b].prompt)
        return why or f"{self.model.path}: the model's logits after {written} tokens hold NaN or allow no token"

    def _generated(self, values_BC: jax.Array) -> list[np.ndarray]:
        """The values at the positions of what was generated, one array a sequence."""
        buffer, length = np.asarray(values_BC), np.asarray(self.state.length)
        new = [buffer[b, len(s.prompt) : length[b]] for b, s in enumerate(self.sequences)]
        return [values[: self.log.kept.get(b)] for b, values in enumerate(new)]

    def note(self, state: DecodeState) -> Note:
        return Note(state.counters, state.policy)

    def _ends(self) -> Note:
        """The notes at the end of each text, or now, in numpy."""
        return self.log.at_ends(self.note(self.state))

    def counters(self) -> list[Counters]:
        """The counters of each sequence; of the times of a batch its share, by rounds and prompt tokens."""
        every = self._ends().counters
        fed = [len(s.prompt) - 1 - self.cached for s in self.sequences]
        shares = zip(_shares(every.rounds), _shares(fed), strict=True)
        times = [self.times.share(decode, prefill) for decode, prefill in shares]
        verifier = self.method.verifier
        measured = verifier and verifier.rule.measures_alpha(tree=verifier.tree, greedy=self.sampling.greedy)
        rows = (jax.tree.map(lambda a, b=b: a[b], every) for b in range(len(fed)))
        return [
            Counters(
                num_rounds=int(c.rounds),
                num_drafts=int(c.drafts),
                num_draft_tokens=int(c.drafted),
                num_tested=int(c.tested),
                num_accepted_tokens=int(c.accepted),
                num_accepted_tokens_per_pos=tuple(c.accepted_at.tolist()),
                num_emitted_tokens=int(c.emitted),
                target_passes=int(c.rounds) + len(chunk_rows(prompt)),
                alpha=float(c.alpha),
                alpha_var=float(c.alpha_var),
                num_alpha_tested=int(c.tested) if measured else 0,
                times=spent,
            )
            for c, prompt, spent in zip(rows, fed, times, strict=True)
        ]

    def drafts(self) -> list[tuple[tuple[int, int], ...]] | None:
        """Drafted and accepted tokens of each round that drafted, by sequence; None if rounds are not noted."""
        if not self.noting or self.method.drafter is None:
            return None
        return [tuple(self.log.drafts(b, int(r))) for b, r in enumerate(self._ends().counters.rounds)]

    def policies(self) -> list[PolicyReport] | None:
        """The policy's report on each sequence; None without a policy, and for several sources of drafts."""
        policy, state = self.method.policy, self._ends().policy
        if policy is None or len(state.sources) > 1:
            return None
        return policy.reports(state.sources[0], state.off)


def _shares(proportions: ArrayLike) -> list[float]:
    """Parts of one in these proportions; equal ones if all are 0."""
    weights = np.asarray(proportions, np.float64)
    return (weights / weights.sum() if weights.any() else np.full(weights.shape, 1 / len(weights))).tolist()
