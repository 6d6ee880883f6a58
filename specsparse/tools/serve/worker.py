"""The one thread that decodes: requests wait in a bounded queue, and some that wait start together as a batch."""

import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from specsparse.engine.feed import CHUNKS
from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.stopping import TokenText
from specsparse.errors import UserError
from specsparse.runtime.binding import ready
from specsparse.runtime.device_batch import Request
from specsparse.runtime.metrics import Counters
from specsparse.runtime.results import Generation, TokenLogprobs, generations, logprobs_of, read_texts
from specsparse.runtime.session import Session
from specsparse.speculative.base import Drafter, Verifier
from specsparse.speculative.drafters.plan import DrafterPlan
from specsparse.tools.serve.errors import Busy

DrafterLike = str | Drafter | DrafterPlan | None
"""As `specsparse.generate` takes it."""


class Pair(NamedTuple):
    """How to decode: a drafter and a verifier as `specsparse.generate` takes them."""

    drafter: DrafterLike = None
    verifier: Verifier | None = None


@dataclass
class Moments:
    """Moments of a completion on the clock of `time.perf_counter`; one that has not come is the one before it."""

    arrived: float
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0


class News(NamedTuple):
    """What came of a completion: text that may be shown, how many tokens, and their log probabilities if asked for."""

    index: int
    text: str
    tokens: int
    logprobs: tuple[TokenLogprobs, ...]


class Done(NamedTuple):
    """A completion is there."""

    index: int
    generation: Generation
    times: Moments


class Failed(NamedTuple):
    """The request cannot be decoded; `asked` where the request is at fault."""

    message: str
    asked: bool


Event = News | Done | Failed
MOST_PROGRAMS = 256
"""Compiled programs that are kept: each other number of completions, stop ids or bad words has its own."""
_ENDS = Failed("the server ends", asked=False)


class Account(Protocol):
    """Who is told of completions that ended (`specsparse.tools.serve.totals`)."""

    def ended(self, reason: str, prompt: int, counters: Counters, times: Moments) -> None:
        """One has: "stop", "length" or "abort"."""
        ...

    def load(self, running: int, waiting: int) -> None:
        """So many requests are decoded, and so many wait; -1 is as before."""
        ...


@dataclass(eq=False)
class Ticket:
    """A request in the queue.

    Attributes:
        sequences: its completions, prompt by prompt.
        pair: how to decode.
        tell: called by the worker with each event; must not wait.
        live: whether pieces are shown as they come; else they may be larger.
        arrived: when, on the clock of `time.perf_counter`.
        gone: set when nobody waits for the answer any more.
    """

    sequences: list[Request]
    pair: Pair
    tell: Callable[[Event], None]
    live: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    gone: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Running:
    """A completion that is decoded."""

    ticket: Ticket
    index: int
    text: TokenText
    times: Moments
    logprobs: int = 0
    """Tokens whose log probabilities were told."""


class Worker:
    """Decodes tickets one batch after the other, each as `specsparse.generate` does.

    Args:
        model: the target.
        account: is told of what ended.
        batch: completions that may start together, of requests that ask for the same drafter and verifier; a request of
            more runs alone.
        room: requests that may wait.
    """

    def __init__(self, model: Model, account: Account, *, batch: int = 1, room: int = 32):
        self.model, self._account, self._batch, self._room = model, account, batch, room
        self._waiting: deque[Ticket] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="specsparse-serve", daemon=True)

    def warm_up(self, pair: Pair, params: SamplingParams, capacities: Iterable[int]) -> None:
        """Compiles what requests with such parameters need in caches of these capacities; before `start`.

        Prompts of every size of piece are fed, and a round is run of each number of completions up to `batch`.
        """
        for batch, capacity in itertools.product(range(1, self._batch + 1), capacities):
            model, method = ready(self.model, *pair, params, batch=batch)
            for length in CHUNKS:
                if (left := capacity - model.room_for(method.max_nodes) - length) < 1:
                    continue
                prompt, own = np.zeros(length, np.int32), params.merged(max_tokens=left)
                session = Session(model, [Request(prompt, own, 0, i) for i in range(batch)], method, noting=True)
                session.advance(1)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Puts a request into the queue.

        Raises:
            Busy: it is full, or the worker was closed.
        """
        with self._news:
            self._forget_gone()
            if self._closed or len(self._waiting) >= self._room:
                raise Busy(f"{len(self._waiting)} requests wait already, the most that may: try again later")
            self._waiting.append(ticket)
            self._account.load(-1, len(self._waiting))
            self._news.notify()

    def close(self, seconds: float = 30.0) -> None:
        """Ends what is decoded with its round, and waits for that."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(seconds)
        for ticket in self._waiting:
            ticket.tell(_ENDS)

    def _forget_gone(self) -> None:
        self._waiting = deque(t for t in self._waiting if not t.gone.is_set())

    def _run(self) -> None:
        while tickets := self._take():
            try:
                self._decode(tickets)
            except Exception:  # the server lives on
                traceback.print_exc()
                for ticket in tickets:
                    ticket.tell(Failed("the server failed in this request; its log has more", asked=False))
            self._account.load(0, -1)

    def _take(self) -> list[Ticket]:
        """The first that waits, and those after it that may start with it; none after `close`."""
        with self._news:
            while True:
                self._forget_gone()
                if self._closed or self._waiting:
                    break
                self._news.wait()
            if self._closed:
                return []
            taken = [self._waiting.popleft()]
            room = self._batch - len(taken[0].sequences)
            for ticket in list(self._waiting):
                if ticket.pair == taken[0].pair and len(ticket.sequences) <= room:
                    taken.append(ticket)
                    room -= len(ticket.sequences)
                    self._waiting.remove(ticket)
            self._account.load(len(taken), len(self._waiting))
            return taken

    def _decode(self, tickets: list[Ticket]) -> None:
        """Decodes a batch to its end; one that cannot begin is tried request by request."""
        started = time.perf_counter()
        if len(self.model.programs) > MOST_PROGRAMS:
            self.model.programs.clear()  # else requests could fill the memory
        try:
            session = self._session(tickets)
        except UserError as error:
            if len(tickets) > 1:
                for ticket in tickets:
                    self._decode([ticket])
            else:
                tickets[0].tell(Failed(str(error), asked=True))
            return
        owners = [(ticket, i) for ticket in tickets for i in range(len(ticket.sequences))]
        running = {
            b: _Running(t, i, TokenText(self.model.tokenizer, t.sequences[i].params), Moments(t.arrived, started))
            for b, (t, i) in enumerate(owners)
        }
        rounds = 1
        while running:
            self._drop(session, running)
            if Finish.RUNNING in session.finish:
                session.advance(rounds)
            self._tell(session, running)
            live = any(r.ticket.live for r in running.values())
            rounds = 1 if live else session.runner.rounds

    def _session(self, tickets: Sequence[Ticket]) -> Session:
        sequences = [s for ticket in tickets for s in ticket.sequences]
        hottest = max((s.params for s in sequences), key=lambda p: 0.0 if p.greedy else p.temperature)
        model, method = ready(self.model, *tickets[0].pair, hottest, batch=len(sequences))
        return Session(model, sequences, method, noting=True)

    def _drop(self, session: Session, running: dict[int, _Running]) -> None:
        """Ends the completions that nobody waits for."""
        gone = [b for b, r in running.items() if self._closed or r.ticket.gone.is_set()]
        if not gone:
            return
        session.drop(gone)
        counters, now = session.counters(), time.perf_counter()
        for b in gone:
            ended = running.pop(b)
            ended.ticket.tell(_ENDS)
            times = ended.times
            times.ended = now
            self._account.ended("abort", len(session.sequences[b].prompt), counters[b], times)

    def _tell(self, session: Session, running: dict[int, _Running]) -> None:
        """Hands on what the last rounds brought."""
        if not running:
            return
        pieces = read_texts(session, {b: r.text for b, r in running.items()})
        now = time.perf_counter()
        for b, r in list(running.items()):
            r.times.ended = now
            r.times.first = r.times.first or now
            text = "".join(piece for _, piece in pieces[b])
            if not r.text.ended:
                if text or r.text.count > r.logprobs:
                    news = logprobs_of(session, b, r.logprobs, r.text.count)
                    r.ticket.tell(News(r.index, text, r.text.count, news))
                    r.logprobs = r.text.count
                continue
            del running[b]
            self._end(session, b, r, text)

    def _end(self, session: Session, b: int, r: _Running, text: str) -> None:
        try:
            [generation] = generations(session, {b: r.text}, only=(b,))
        except UserError as error:  # no law to draw from
            r.ticket.gone.set()
            r.ticket.tell(Failed(str(error), asked=False))
            return
        news = (generation.logprobs or ())[r.logprobs :]
        r.ticket.tell(News(r.index, text, len(generation.token_ids), news))
        r.ticket.tell(Done(r.index, generation, r.times))
        counters = generation.stats.counters
        self._account.ended(generation.finish_reason, len(generation.prompt_token_ids), counters, r.times)
