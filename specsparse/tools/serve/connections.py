"""Connections of HTTP: not too many, and one is ended that brings no request or takes no answer in time."""

import asyncio

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specsparse.tools.serve.bodies import PATIENCE_S

MOST_CONNECTIONS = 200
"""That are open at once; each takes one of the files that the process may have open. One more is ended at once."""


class Impatient(H11Protocol):
    """A connection that is ended where `PATIENCE_S` pass without a request (none at all, or half a head), or where
    nothing is read of an answer that waits to be sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opened."""
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
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


def config_of(app: ASGIApp, *, grace_s: int, log_level: str = "warning") -> uvicorn.Config:
    """How uvicorn serves an application.

    Args:
        app: of `Service.app`.
        grace_s: seconds that open answers have left at the end.
        log_level: of uvicorn.
    """
    return uvicorn.Config(
        app, http=Impatient, log_level=log_level, access_log=False, ws="none", lifespan="on",
        timeout_graceful_shutdown=grace_s,
    )  # fmt: skip
