"""Errors as a client of OpenAI reads them: a status and one object."""

from specsparse.support.files import Json


class HttpError(Exception):
    """A request that cannot be answered.

    Args:
        status: of HTTP.
        message: one line.
        kind: `type` of the object, as OpenAI names them.
        code: what a program may look at, or None.
        param: the field that is wrong, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        param: str | None = None,
    ):
        super().__init__(" ".join(message.split()))
        self.status, self.kind, self.code, self.param = status, kind, code, param

    def body(self) -> Json:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class Busy(Exception):
    """The queue is full, or the server is about to end."""
