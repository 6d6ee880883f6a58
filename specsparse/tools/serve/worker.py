"""The one thread that decodes: requests wait in a bounded queue, and some that wait start together as a batch."""

import dataclasses
import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from specsparse.engine import hosts
from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.prefill import CHUNKS
from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.stopping import TokenText
from specsparse.errors import UserError
from specsparse.runtime.method import MethodSpec, ready
from specsparse.runtime.prefix_cache import PrefixCache
from specsparse.runtime.results import Generation, TokenLogprobs, generations, logprobs_of, read_texts
from specsparse.runtime.session import Request, Session
from specsparse.tools.serve.prometheus import ServerMetrics, Timings

MAX_PROGRAMS = 256
"""Compiled programs that are kept: each other number of completions, stop ids or bad words has its own."""
MAX_DRAFTERS = 4
"""Built drafters that are kept, with their weights: of those that draw, each other temperature has its own."""
FAILED = "the server failed in this request; its log has more"


class Busy(Exception):
    """The queue is full, or the server is about to end."""


class TextEvent(NamedTuple):
    """New text of a completion, its tokens so far, and log probabilities of the new ones if the request has them."""

    index: int
    text: str
    tokens: int
    logprobs: tuple[TokenLogprobs, ...]


class Finished(NamedTuple):
    index: int
    generation: Generation
    times: Timings


class Failed(NamedTuple):
    """The request cannot be decoded; `refused` if the request itself is at fault."""

    message: str
    refused: bool = False


StreamEvent = TextEvent | Finished | Failed
_ENDS = Failed("the server ends")


@dataclass(eq=False)
class RequestHandle:
    sequences: list[Request]  # its completions, prompt by prompt
    spec: MethodSpec  # a checked method: a drafter and a verifier
    tell: Callable[[StreamEvent], None]  # called by the worker with each event; must not wait
    live: bool = False  # texts are shown as they come; else they may come in larger parts
    arrived: float = field(default_factory=time.perf_counter)
    gone: threading.Event = field(default_factory=threading.Event)  # set when the client no longer waits for the answer


@dataclass
class _Running:
    """A completion that is decoded; `logprobs` counts the tokens whose log probabilities were told."""

    handle: RequestHandle
    index: int
    text: TokenText
    times: Timings
    logprobs: int = 0


def _plain(sequence: Request) -> tuple[object, ...]:
    """A sequence as JSON has it, for the other hosts."""
    given = {k: v for k, v in dataclasses.asdict(sequence.params).items() if v != getattr(SamplingParams(), k)}
    return sequence.prompt.tolist(), given, sequence.seed, sequence.sample


class Worker:
    """Decodes requests one batch after the other, each as `specsparse.generate` does.

    Of the `room` requests that may wait, those with the same drafter and verifier start together, up to `batch`
    completions; a request of more runs alone. Of the latest `prefixes` texts keys and values are kept.
    """

    def __init__(self, model: Model, metrics: ServerMetrics, *, batch: int = 1, room: int = 32, prefixes: int = 1):
        self.model, self._metrics, self._batch, self._room = model, metrics, batch, room
        self._prefix_cache = PrefixCache(prefixes)
        self._waiting: deque[RequestHandle] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="specsparse-serve", daemon=True)

    def warm_up(self, spec: MethodSpec, params: SamplingParams, capacities: Iterable[int]) -> None:
        """Compiles the programs of requests with such parameters in caches of these capacities; before `start`.

        Prompts of every size of chunk are fed, and a round is run of each number of completions up to `batch`.
        """
        for batch, capacity in itertools.product(range(1, self._batch + 1), capacities):
            model, method = ready(replace(spec, sampling=params), self.model, batch=batch)
            for length in CHUNKS:
                if (left := capacity - model.room_for(method.max_nodes) - length) < 1:
                    continue
                prompt, own = np.zeros(length, np.int32), params.merged(max_tokens=left)
                session = Session(model, [Request(prompt, own, 0, i) for i in range(batch)], method, noting=True)
                session.advance(1)

    def start(self) -> None:
        self._thread.start()

    def submit(self, handle: RequestHandle) -> None:
        """Puts a request into the queue, or raises Busy: it is full, or the worker was closed."""
        with self._changed:
            self._forget_gone()
            if self._closed or len(self._waiting) >= self._room:
                raise Busy(f"{len(self._waiting)} requests wait already, the most that may: try again later")
            self._waiting.append(handle)
            self._metrics.load(waiting=len(self._waiting))
            self._changed.notify()

    def follow(self, spec_at: Callable[[float], MethodSpec]) -> None:
        """Decodes the batches of process 0 with it, in place of `start`, until that closes its worker."""
        while batch := hosts.agreed(None):
            handles = []
            for live, sequences in batch:
                own = [Request(np.array(ids, np.int32), SamplingParams.from_dict(params), seed, sample)
                       for ids, params, seed, sample in sequences]  # fmt: skip
                spec = spec_at(0.0 if own[0].params.greedy else own[0].params.temperature)
                handles.append(RequestHandle(own, spec, lambda _: None, live=live))
            self._decode(handles)

    def close(self, seconds: float = 30.0) -> None:
        """Ends everything that is decoded with its round, and waits for that."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        for handle in self._waiting:
            handle.tell(_ENDS)

    def _forget_gone(self) -> None:
        self._waiting = deque(handle for handle in self._waiting if not handle.gone.is_set())

    def _run(self) -> None:
        while handles := self._take():
            if hosts.count() > 1:
                hosts.agreed([(handle.live, [_plain(s) for s in handle.sequences]) for handle in handles])
            try:
                self._decode(handles)
            except Exception:  # the server lives on
                traceback.print_exc()
                for handle in handles:
                    handle.tell(Failed(FAILED))
                if hosts.count() > 1:
                    hosts.end("a request failed here, see above, and the other processes are no longer in step")
            self._metrics.load(running=0)
        hosts.agreed([])

    def _take(self) -> list[RequestHandle]:
        """The first waiting request and those that may start with it; [] after `close`."""
        with self._changed:
            self._forget_gone()
            while not (self._closed or self._waiting):
                self._changed.wait()
                self._forget_gone()
            if self._closed:
                return []
            taken = [self._waiting.popleft()]
            room = self._batch - len(taken[0].sequences)
            for handle in list(self._waiting):
                if handle.spec == taken[0].spec and len(handle.sequences) <= room:
                    taken.append(handle)
                    room -= len(handle.sequences)
                    self._waiting.remove(handle)
            self._metrics.load(running=len(taken), waiting=len(self._waiting))
            return taken

    def _decode(self, handles: list[RequestHandle]) -> None:
        """Decodes a batch to its end; one that cannot begin is tried request by request."""
        started = time.perf_counter()
        if len(self.model.programs.compiled) > MAX_PROGRAMS:
            self.model.programs.compiled.clear()  # else requests could fill the memory
        drafters = self.model.programs.drafters
        for oldest in list(drafters)[:-MAX_DRAFTERS]:
            del drafters[oldest]
        sequences = [s for handle in handles for s in handle.sequences]
        hottest = max((s.params for s in sequences), key=lambda p: 0.0 if p.greedy else p.temperature)
        try:
            model, method = ready(replace(handles[0].spec, sampling=hottest), self.model, batch=len(sequences))
            session = Session(model, sequences, method, noting=True, prefix_cache=self._prefix_cache)
        except UserError as error:
            if len(handles) > 1:
                for handle in handles:
                    self._decode([handle])
            else:
                handles[0].tell(Failed(str(error), refused=True))
            return
        owners = [(handle, i) for handle in handles for i in range(len(handle.sequences))]
        running = {
            b: _Running(h, i, TokenText(self.model.tokenizer, h.sequences[i].params), Timings(h.arrived, started))
            for b, (h, i) in enumerate(owners)
        }
        rounds = 1
        while running:
            self._drop(session, running)
            if Finish.RUNNING in session.finish:
                session.advance(rounds)
            self._tell(session, running)
            rounds = 1 if any(r.handle.live for r in running.values()) else session.loop.rounds
        session.keep()

    def _drop(self, session: Session, running: dict[int, _Running]) -> None:
        """Ends the completions whose client has left, or all after `close`."""
        gone = hosts.agreed([b for b, r in running.items() if self._closed or r.handle.gone.is_set()])
        if not gone:
            return
        session.drop(gone)
        counters, now = session.counters(), time.perf_counter()
        for b in gone:
            ended = running.pop(b)
            ended.handle.tell(_ENDS)
            ended.times.ended = now
            prompt = len(session.sequences[b].prompt)
            self._metrics.ended("abort", prompt, counters[b], ended.times, cached=session.cached)

    def _tell(self, session: Session, running: dict[int, _Running]) -> None:
        """Sends the new texts and the completions that have ended to their handles."""
        if not running:
            return
        texts, now = read_texts(session, {b: r.text for b, r in running.items()}), time.perf_counter()
        for b, r in list(running.items()):
            r.times.ended, r.times.first = now, r.times.first or now
            text = "".join(part for _, part in texts[b])
            if not r.text.ended:
                if text or r.text.count > r.logprobs:
                    logprobs = logprobs_of(session, b, r.logprobs, r.text.count)
                    r.handle.tell(TextEvent(r.index, text, r.text.count, logprobs))
                    r.logprobs = r.text.count
                continue
            del running[b]
            try:
                [generation] = generations(session, {b: r.text}, only=(b,))
            except UserError as error:  # a distribution without mass
                r.handle.gone.set()
                r.handle.tell(Failed(str(error)))
                continue
            logprobs = (generation.logprobs or ())[r.logprobs :]
            r.handle.tell(TextEvent(r.index, text, len(generation.token_ids), logprobs))
            r.handle.tell(Finished(r.index, generation, r.times))
            counters, prompt = generation.stats.counters, len(generation.prompt_token_ids)
            self._metrics.ended(generation.finish_reason, prompt, counters, r.times, cached=session.cached)
