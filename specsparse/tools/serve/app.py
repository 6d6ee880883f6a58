"""The routes: OpenAI's models, completions and chat completions, `/health` and `/metrics`."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import ContextTooLong, UserError
from specsparse.runtime.requests import sequences_of
from specsparse.support.files import Json
from specsparse.tools.serve import asked as requests
from specsparse.tools.serve.answers import Answer
from specsparse.tools.serve.asked import Asked
from specsparse.tools.serve.bodies import PATIENCE_S, Bodies
from specsparse.tools.serve.errors import Busy, HttpError
from specsparse.tools.serve.gate import Gate
from specsparse.tools.serve.responses import DONE, as_json, refusal, sent
from specsparse.tools.serve.totals import Totals
from specsparse.tools.serve.worker import Done, Event, Failed, Pair, Ticket, Worker


class Service:
    """One model, served.

    Args:
        model: the target.
        name: what requests call it.
        pair_at: the drafter and the verifier at a temperature; refuses a temperature that they are not for.
        positions: tokens of the longest draft, None for plain decoding.
        defaults: sampling parameters where a request says nothing.
        batch, room: as `Worker`'s.
    """

    def __init__(
        self,
        model: Model,
        name: str,
        pair_at: Callable[[float], Pair],
        *,
        positions: int | None,
        defaults: Mapping[str, object] | None = None,
        batch: int = 1,
        room: int = 32,
    ):
        self.model, self.name, self.defaults = model, name, dict(defaults or {})
        self.pair_at = functools.lru_cache(maxsize=256)(pair_at)
        self.totals = Totals(name, model.config.context_length, positions)
        self.worker = Worker(model, self.totals, batch=batch, room=room)
        self.bodies = Bodies()
        self.created = int(time.time())

    def warm_up(self, tokens: int) -> None:
        """Compiles what texts and chats of up to `tokens` tokens need, prompt and answer together, and those that the
        context ends; greedy and drawn, as far as the verifier is for both. Before `app` starts."""
        context = self.model.config.context_length
        capacities = {self.model.capacity_for(n) for n in (*range(1, min(tokens, context), 256), tokens, context)}
        drawn = self.defaults.get("temperature") or 1.0
        for temperature in (0.0, drawn):
            params = SamplingParams.from_dict({**self.defaults, "temperature": temperature})
            with contextlib.suppress(UserError):  # the verifier is not for this temperature
                self.worker.warm_up(self.pair_at(temperature), params, sorted(capacities))

    def app(self, *, key: str | None = None, local: bool = True) -> ASGIApp:
        """The application of ASGI; it starts and ends the worker. `key` and `local` as `Gate`'s."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            try:
                yield
            finally:
                self.bodies.close()
                await asyncio.to_thread(self.worker.close)

        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", functools.partial(self._completions, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", functools.partial(self._completions, chat=True), methods=["POST"]),
        ]
        handlers = {HttpError: _refuse, HTTPException: _refuse_route, ClientDisconnect: _gone, Exception: _failed}
        return Gate(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), key, local=local)

    async def _health(self, _: Request) -> Response:
        return as_json({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        return Response(self.totals.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, _: Request) -> Response:
        return as_json({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return as_json(self._card())

    def _card(self) -> Json:
        own = {"owned_by": "specsparse", "max_model_len": self.model.config.context_length}
        return {"id": self.name, "object": "model", "created": self.created, **own}

    def _check_name(self, name: object) -> None:
        if name is not None and name != self.name:
            message = f"the model {str(name)[:60]!r} is not here; there is {self.name!r}"
            raise HttpError(404, message, code="model_not_found", param="model")

    async def _completions(self, request: Request, *, chat: bool) -> Response:
        events = asyncio.Queue[Event]()
        loop = asyncio.get_running_loop()

        def tell(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def understand(body: Json) -> tuple[Asked, Ticket]:
            self._check_name(body.get("model"))
            asked = requests.read(body, self.defaults, chat=chat)
            return asked, self._ticket(asked, tell)

        asked, ticket = await self.bodies.read(request, understand)
        answer = Answer(asked, ticket, self.name, self.model.tokenizer)
        try:
            self.worker.submit(ticket)
        except Busy as error:
            raise HttpError(503, str(error), "server_error", code="queue_full") from None
        with _given_up(ticket):
            if not asked.stream:
                found = [e async for e in _until_left(request, ticket, events) if isinstance(e, Done)]
                return await asyncio.to_thread(lambda: as_json(answer.whole(found)))
            coming = _until_left(request, ticket, events)
            first = await anext(coming)  # a refusal has its status still
            await coming.aclose()
        return _Stream(_stream(answer, ticket, first, events), ticket)

    def _ticket(self, asked: Asked, tell: Callable[[Event], None]) -> Ticket:
        """The request as the worker takes it."""
        params = asked.params
        try:
            pair = self.pair_at(0.0 if params.greedy else params.temperature)
            sequences = [s for group in sequences_of(self.model, asked.prompts, params) for s in group]
        except UserError as error:
            long = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
            raise HttpError(400, str(error), code=long) from None
        return Ticket(sequences, pair, tell, live=asked.stream)


class _Stream(StreamingResponse):
    """Server-sent events; where the client leaves, the decoding ends."""

    def __init__(self, content: AsyncIterator[bytes], ticket: Ticket):
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them; a client that does not read counts as one that left."""

        async def patiently(message: Message) -> None:
            async with asyncio.timeout(PATIENCE_S):
                await send(message)

        with _given_up(self._ticket), contextlib.suppress(TimeoutError):
            await super().__call__(scope, receive, patiently)
        self._ticket.gone.set()


@contextlib.contextmanager
def _given_up(ticket: Ticket) -> Iterator[None]:
    """Ends the decoding where the request fails here or is cancelled."""
    try:
        yield
    except BaseException:
        ticket.gone.set()
        raise


async def _until_left(request: Request, ticket: Ticket, events: "asyncio.Queue[Event]") -> AsyncIterator[Event]:
    """The events of a ticket until all completions are there.

    Raises:
        HttpError: the worker could not decode it.
        ClientDisconnect: the client has left; the decoding ends.
    """
    left, rest = asyncio.ensure_future(_left(request)), len(ticket.sequences)
    coming: asyncio.Future[Event] | None = None
    try:
        while rest:
            coming = asyncio.ensure_future(events.get())
            await asyncio.wait({left, coming}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise ClientDisconnect
            event = coming.result()
            if isinstance(event, Failed):
                raise HttpError(400 if event.asked else 500, event.message, *(() if event.asked else ("server_error",)))
            rest -= isinstance(event, Done)
            yield event
    finally:
        left.cancel()
        if coming is not None:
            coming.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(answer: Answer, ticket: Ticket, event: Event, events: "asyncio.Queue[Event]") -> AsyncIterator[bytes]:
    """Server-sent events."""
    rest = len(ticket.sequences)
    while not isinstance(event, Failed):
        for chunk in answer.chunks(event):
            yield sent(chunk)
        rest -= isinstance(event, Done)
        if not rest:
            break
        event = await events.get()
    if isinstance(event, Failed):
        yield sent(HttpError(500, event.message, "server_error").body())
    else:
        for chunk in answer.last():
            yield sent(chunk)
    yield DONE


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return refusal(error)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "there is no such address" if error.status_code == 404 else error.detail
    return refusal(HttpError(error.status_code, f"{request.method} {request.url.path[:80]}: {what}"))


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(_: Request, __: Exception) -> Response:
    return refusal(HttpError(500, "the server failed in this request; its log has more", "server_error"))
