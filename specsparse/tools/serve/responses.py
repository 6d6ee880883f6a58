"""Responses of HTTP: JSON, refusals, and events of a stream."""

from starlette.responses import Response

from specsparse.support.files import Json
from specsparse.tools.serve.answers import dumped
from specsparse.tools.serve.errors import HttpError

DONE = b"data: [DONE]\n\n"


def as_json(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An object."""
    return Response(dumped(value), status, headers, media_type="application/json")


def refusal(error: HttpError) -> Response:
    """An error's object; one that passes says when to try again."""
    return as_json(error.body(), error.status, {"Retry-After": "1"} if error.status in (429, 503) else None)


def sent(value: Json) -> bytes:
    """An event of a stream."""
    return b"data: " + dumped(value) + b"\n\n"
