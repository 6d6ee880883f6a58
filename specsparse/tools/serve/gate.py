"""Who may come in: the key, and on loopback the names that this machine has for itself."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specsparse.tools.serve.errors import HttpError
from specsparse.tools.serve.responses import refusal

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
OPEN_PATHS = ("/health",)
"""Answered without a key."""


class Gate:
    """Refuses what may not come in.

    Args:
        app: what lies behind.
        key: asked for as `Authorization: Bearer KEY`; None asks for none.
        local: whether `Host` must name this machine, so that no web page reaches the server by a name of its own.
    """

    def __init__(self, app: ASGIApp, key: str | None, *, local: bool):
        self._app, self._key, self._local = app, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        error = self._refused(scope) if scope["type"] == "http" else None
        await (self._app if error is None else refusal(error))(scope, receive, send)

    def _refused(self, scope: Scope) -> HttpError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = host if host.endswith("]") or ":" not in host else host.rpartition(":")[0]
        if self._local and name not in LOCAL_NAMES:
            return HttpError(403, f"the server answers to localhost, not to {name[:60]!r}", code="wrong_host")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key.encode()):
            return None
        return HttpError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")
