"""Bodies of requests: few at once, none too large or too slow, and read off the event loop."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from specsparse.support.files import Json
from specsparse.tools.serve.errors import HttpError

T = TypeVar("T")
MOST_BYTES = 8 * 2**20
"""Of a body."""
MOST_BODIES = 64
"""That are on their way at once: with `MOST_BYTES` what they take of the memory."""
PATIENCE_S = 30.0
"""That a body may take to come, and a client to read a part of a stream."""
_READERS = 2


class Bodies:
    """Takes bodies in and hands them to a function, all in threads of their own: others are answered meanwhile."""

    def __init__(self):
        self._coming = 0
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="specsparse-read")

    async def read(self, request: Request, understand: Callable[[Json], T]) -> T:
        """What `understand` makes of the JSON object of a request.

        Raises:
            HttpError: too many at once, another type, too large, too slow, or no object of JSON; as `understand` does.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, f"send Content-Type: application/json, not {kind[:60] or 'none'}")
        if self._coming >= MOST_BODIES:
            message = f"{MOST_BODIES} requests are being read already, the most that may: try again later"
            raise HttpError(503, message, "server_error", code="queue_full")
        self._coming += 1
        try:
            data = await _bytes(request)
            return await asyncio.get_running_loop().run_in_executor(self._readers, lambda: understand(_object(data)))
        finally:
            self._coming -= 1

    def close(self) -> None:
        """Ends the threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)


async def _bytes(request: Request) -> bytes:
    data = bytearray()
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for part in request.stream():
                data += part
                if len(data) > MOST_BYTES:
                    raise HttpError(413, f"the request is larger than {MOST_BYTES // 2**20} MiB")
    except TimeoutError:
        raise HttpError(408, f"the request did not come within {PATIENCE_S:g} seconds") from None
    return bytes(data)


def _object(data: bytes) -> Json:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the request is no JSON ({str(error)[:100]})") from None
    if not isinstance(body, dict):
        raise HttpError(400, "the request must be an object of JSON")
    return body
