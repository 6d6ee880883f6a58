"""The server's application: routes, who may ask, bodies of requests, streams, and connections that wait too long."""

import asyncio
import contextlib
import functools
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

import specsparse
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import ContextTooLong, UserError
from specsparse.runtime.method import MethodSpec
from specsparse.runtime.session import requests
from specsparse.support.files import Json
from specsparse.tools.serve.prometheus import ServerMetrics
from specsparse.tools.serve.protocol import (
    Answer,
    CompletionRequest,
    HttpError,
    detokenized,
    parse_request,
    to_bytes,
    tokenized,
)
from specsparse.tools.serve.worker import FAILED, Busy, Failed, Finished, RequestHandle, StreamEvent, Worker

T = TypeVar("T")
MAX_BYTES = 8 * 2**20
"""Of a body."""
MAX_BODIES = 64
"""Bodies that are read at once: times `MAX_BYTES` the memory for them."""
MAX_CONNECTIONS = 200
"""Connections that are open at once, each one of the process's open files. One more is closed at once."""
PATIENCE_S = 30.0
"""Seconds for a body to come, for a client to read a part of a stream, and for a connection to do something."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
OPEN_PATHS = ("/health",)
"""Answered without a key."""
Events = asyncio.Queue[StreamEvent]


def as_json(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_bytes(value), status, headers, media_type="application/json")


def refusal(error: HttpError) -> Response:
    """The response of an error; a temporary one says when to try again."""
    return as_json(error.body(), error.status, {"Retry-After": "1"} if error.status in (429, 503) else None)


class Service:
    """One model, served under a name.

    `spec_at` gives the drafter and the verifier at a temperature, or refuses it; `positions` are the tokens of the
    longest draft, None for plain decoding; `defaults` are sampling parameters that a request may leave out.
    """

    def __init__(
        self, model: Model, name: str, spec_at: Callable[[float], MethodSpec], *, positions: int | None,
        defaults: Mapping[str, object] | None = None, batch: int = 1, room: int = 32,
        prefixes: int = 1,
    ):  # fmt: skip
        self.model, self.name, self.defaults = model, name, dict(defaults or {})
        self.spec_at = functools.lru_cache(maxsize=256)(spec_at)
        self.metrics = ServerMetrics(name, model.config.context_length, positions)
        self.worker = Worker(model, self.metrics, batch=batch, room=room, prefixes=prefixes)
        self.bodies = BodyReader()
        self.created = int(time.time())

    def warm_up(self, tokens: int) -> None:
        """Compiles the programs of texts and chats of up to `tokens` tokens, prompt and answer together, and of those
        that the context ends; greedy and drawn, if the verifier is for both. Before `app` starts."""
        context = self.model.config.context_length
        capacities = {self.model.capacity_for(n) for n in (*range(1, min(tokens, context), 256), tokens, context)}
        for temperature in (0.0, self.defaults.get("temperature") or 1.0):
            params = SamplingParams.from_dict({**self.defaults, "temperature": temperature})
            with contextlib.suppress(UserError):  # the verifier is not for this temperature
                self.worker.warm_up(self.spec_at(temperature), params, sorted(capacities))

    def app(self, *, key: str | None = None, local: bool = True) -> ASGIApp:
        """The ASGI application; it starts and ends the worker. `key` and `local` as `AccessControl`'s."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
            self.worker.start()
            try:
                yield
            finally:
                self.bodies.close()
                await asyncio.to_thread(self.worker.close)

        async def health(_: Request) -> Response:
            return as_json({"status": "ok"})

        async def version(_: Request) -> Response:
            return as_json({"version": specsparse.__version__})

        async def metrics(_: Request) -> Response:
            return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

        async def answer(request: Request, error: Exception) -> Response:
            if isinstance(error, ClientDisconnect):
                return Response(status_code=499)  # the client has left
            if isinstance(error, HTTPException):
                what = "there is no such address" if error.status_code == 404 else error.detail
                error = HttpError(error.status_code, f"{request.method} {request.url.path[:80]}: {what}")
            return refusal(error if isinstance(error, HttpError) else HttpError(500, FAILED, "server_error"))

        routes = [
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/version", version),
            Route("/tokenize", functools.partial(self._tokens, tokenized), methods=["POST"]),
            Route("/detokenize", functools.partial(self._tokens, detokenized), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/completions", functools.partial(self._completions, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", functools.partial(self._completions, chat=True), methods=["POST"]),
        ]
        handlers = dict.fromkeys((HttpError, HTTPException, ClientDisconnect, Exception), answer)
        return AccessControl(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), key, local=local)

    async def _models(self, request: Request) -> Response:
        """The one model, in a list or by its name."""
        own = {"owned_by": "specsparse", "max_model_len": self.model.config.context_length}
        card = {"id": self.name, "object": "model", "created": self.created, **own}
        if "name" not in request.path_params:
            return as_json({"object": "list", "data": [card]})
        self._check_name(request.path_params["name"])
        return as_json(card)

    async def _tokens(self, answer: Callable[[Json, Model], Json], request: Request) -> Response:
        """`tokenized` or `detokenized` of a request's body."""

        def parse(body: Json) -> Response:
            self._check_name(body.get("model"))
            try:
                return as_json(answer(body, self.model))
            except UserError as error:
                raise HttpError(400, str(error)) from None

        return await self.bodies.read(request, parse)

    def _check_name(self, name: object) -> None:
        if name is not None and name != self.name:
            message = f"the model {str(name)[:60]!r} is not here; there is {self.name!r}"
            raise HttpError(404, message, code="model_not_found", param="model")

    async def _completions(self, request: Request, *, chat: bool) -> Response:
        events, loop = Events(), asyncio.get_running_loop()

        def tell(event: StreamEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def parse(body: Json) -> tuple[CompletionRequest, RequestHandle]:
            self._check_name(body.get("model"))
            completion = parse_request(body, self.defaults, chat=chat)
            params = completion.params
            try:
                spec = self.spec_at(0.0 if params.greedy else params.temperature)
                prompts = completion.prompts
                if chat:
                    template, own = self.model.tokenizer.apply_chat_template, completion.template_kwargs
                    prompts = [template(messages, chat_template_kwargs=own) for messages in prompts]
                sequences = [s for group in requests(self.model, prompts, params) for s in group]
            except UserError as error:
                long = "context_length_exceeded" if isinstance(error, ContextTooLong) else None
                raise HttpError(400, str(error), code=long) from None
            return completion, RequestHandle(sequences, spec, tell, live=completion.stream)

        completion, handle = await self.bodies.read(request, parse)
        answer = Answer(completion, handle, self.name, self.model.tokenizer)
        try:
            self.worker.submit(handle)
        except Busy as error:
            raise HttpError(503, str(error), "server_error", code="queue_full") from None
        with _giving_up(handle):
            if not completion.stream:
                finished = [e async for e in _events(request, handle, events) if isinstance(e, Finished)]
                return await asyncio.to_thread(lambda: as_json(answer.whole(finished)))
            coming = _events(request, handle, events)
            first = await anext(coming)  # a refusal still has its status
            await coming.aclose()
        return EventStream(_chunks(answer, handle, first, events), handle)


class AccessControl:
    """Refuses requests to `app` without the key (`Authorization: Bearer KEY`), if there is one.

    If it is `local`, `Host` must name this machine, so that no web page reaches the server by a name of its own.
    """

    def __init__(self, app: ASGIApp, key: str | None, *, local: bool):
        self._app, self._key, self._local = app, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, (scheme, _, given) = headers.get("host", ""), headers.get("authorization", "").partition(" ")
            name = host if host.endswith("]") or ":" not in host else host.rpartition(":")[0]
            key = given.strip().encode() if scheme.lower() == "bearer" else b""
            needed = None if scope["path"] in OPEN_PATHS else self._key
            if self._local and name not in LOCAL_NAMES:
                message = f"the server answers to localhost, not to {name[:60]!r}"
                answer = refusal(HttpError(403, message, code="wrong_host"))
            elif needed is not None and not hmac.compare_digest(key, needed.encode()):
                message = "the API key is missing or wrong: send Authorization: Bearer KEY"
                answer = refusal(HttpError(401, message, code="invalid_api_key"))
        await answer(scope, receive, send)


class BodyReader:
    """Reads bodies, not too many at once, and parses them in threads of its own: others are answered meanwhile."""

    def __init__(self):
        self.coming = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="specsparse-read")

    async def read(self, request: Request, parse: Callable[[Json], T]) -> T:
        """`parse` of the JSON object of a request; HttpError for too many at once, too large or slow a body, or no
        object of JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, f"send Content-Type: application/json, not {kind[:60] or 'none'}")
        if self.coming >= MAX_BODIES:
            message = f"{MAX_BODIES} requests are being read already, the most that may: try again later"
            raise HttpError(503, message, "server_error", code="queue_full")
        self.coming += 1
        try:
            data = bytearray()
            async with asyncio.timeout(PATIENCE_S):
                async for part in request.stream():
                    data += part
                    if len(data) > MAX_BYTES:
                        raise HttpError(413, f"the request is larger than {MAX_BYTES // 2**20} MiB")

            def parsed() -> T:
                try:
                    body = json.loads(bytes(data))
                except (ValueError, RecursionError) as error:
                    raise HttpError(400, f"the request is no JSON ({str(error)[:100]})") from None
                if not isinstance(body, dict):
                    raise HttpError(400, "the request must be an object of JSON")
                return parse(body)

            return await asyncio.get_running_loop().run_in_executor(self._threads, parsed)
        except TimeoutError:
            raise HttpError(408, f"the request did not come within {PATIENCE_S:g} seconds") from None
        finally:
            self.coming -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class EventStream(StreamingResponse):
    """Server-sent events; when the client leaves, the decoding ends. One that does not read counts as one that left."""

    def __init__(self, content: AsyncIterator[bytes], handle: RequestHandle):
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(PATIENCE_S):
                await send(message)

        with _giving_up(self._handle), contextlib.suppress(TimeoutError):
            await super().__call__(scope, receive, send_in_time)
        self._handle.gone.set()


@contextlib.contextmanager
def _giving_up(handle: RequestHandle) -> Generator[None]:
    """Stops decoding for this request if the block fails or is cancelled."""
    try:
        yield
    except BaseException:
        handle.gone.set()
        raise


async def _events(request: Request, handle: RequestHandle, events: Events) -> AsyncGenerator[StreamEvent, None]:
    """The events of a request until all its completions have ended; HttpError if the worker could not decode it,
    ClientDisconnect if the client has left."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    left, rest = asyncio.ensure_future(disconnected()), len(handle.sequences)
    coming: asyncio.Future[StreamEvent] | None = None
    try:
        while rest:
            coming = asyncio.ensure_future(events.get())
            await asyncio.wait({left, coming}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise ClientDisconnect
            event = coming.result()
            if isinstance(event, Failed):
                raise HttpError(400, event.message) if event.refused else HttpError(500, event.message, "server_error")
            rest -= isinstance(event, Finished)
            yield event
    finally:
        left.cancel()
        if coming is not None:
            coming.cancel()


async def _chunks(
    answer: Answer, handle: RequestHandle, event: StreamEvent, events: Events
) -> AsyncIterator[bytes]:  # fmt: skip
    """Server-sent events, the first of them given."""

    def data(value: Json) -> bytes:
        return b"data: " + to_bytes(value) + b"\n\n"

    rest = len(handle.sequences)
    while not isinstance(event, Failed):
        for chunk in answer.chunks(event):
            yield data(chunk)
        rest -= isinstance(event, Finished)
        if not rest:
            break
        event = await events.get()
    if isinstance(event, Failed):
        yield data(HttpError(500, event.message, "server_error").body())
    else:
        for chunk in answer.last():
            yield data(chunk)
    yield b"data: [DONE]\n\n"


class ImpatientProtocol(H11Protocol):
    """A connection that is closed after `PATIENCE_S` without a request (none at all, or half a head), or if nothing is
    read of an answer that waits to be sent."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
        else:
            self._look_again()

    def _look_again(self) -> None:
        self.loop.call_later(PATIENCE_S, self._look, self.cycle, self.transport.get_write_buffer_size())

    def _look(self, before: RequestResponseCycle | None, unsent: int) -> None:
        idle = self.cycle is before and (before is None or before.response_complete)
        if idle or (unsent and self.transport.get_write_buffer_size() == unsent):
            self.transport.abort()
        elif not self.transport.is_closing():
            self._look_again()


def uvicorn_config(app: ASGIApp, *, grace_s: int, log_level: str = "warning") -> uvicorn.Config:
    """The server of `app`; open answers have `grace_s` seconds left at the end."""
    return uvicorn.Config(
        app, http=ImpatientProtocol, log_level=log_level, access_log=False, ws="none", lifespan="on",
        timeout_graceful_shutdown=grace_s,
    )  # fmt: skip
