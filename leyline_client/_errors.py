"""The one exception tree. Every server code maps to exactly one class, and back.

::

    LeylineError
    ├── ConfigurationError            a wrong argument on this side
    ├── PolicyError                   a policy raised
    │   ├── PolicyRegistrationError   refused when registered
    │   └── PolicyRuleError           its plan would break the conversation; the server was not called
    ├── TransportError                no usable answer
    │   ├── ServerUnreachable
    │   ├── ServerTimeout
    │   └── ProtocolError             an answer that is not the protocol's
    ├── ExtensionMissing              a server without Leyline on the other side
    └── ServerError                   a typed refusal; .status, .code, .param, .detail
        ├── InvalidRequest            422 invalid_request
        │   ├── InvalidDirective      422 invalid_directive
        │   └── InvalidEdit           422 invalid_edit
        ├── UnknownSession            404 unknown_session
        ├── VersionConflict           409 version_conflict
        ├── HistoryEdited             409 history_edited
        ├── NothingToUndo             409 nothing_to_undo
        ├── PayloadTooLarge           413 payload_too_large
        ├── TooManySessions           429 too_many_sessions
        ├── Unsupported               501 unsupported
        ├── Overloaded                503 overloaded
        ├── InternalError             500 internal_error
        └── UpstreamError             the engine's own refusal, passed on with its status
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class LeylineError(Exception):
    """Base of everything this library raises on purpose."""


class ConfigurationError(LeylineError):
    """A wrong argument or a missing optional package on this side; the message says what to do."""


class PolicyError(LeylineError):
    """A policy raised, or its plan cannot be used."""

    def __init__(self, message: str, *, policy: str) -> None:
        super().__init__(f"policy {policy!r}: {message}")
        self.policy = policy


class PolicyRegistrationError(PolicyError):
    """A policy was refused when it was registered."""


class PolicyRuleError(PolicyError):
    """A policy's plan breaks a rule of the conversation. The server was not called."""

    def __init__(self, message: str, *, policy: str, rule: str) -> None:
        super().__init__(f"breaks the rule {rule!r}: {message}", policy=policy)
        self.rule = rule


class TransportError(LeylineError):
    """No usable answer came back."""


class ServerUnreachable(TransportError):
    """The server could not be connected to, or the connection broke."""


class ServerTimeout(TransportError):
    """The server did not answer in time."""


class ProtocolError(TransportError):
    """The answer was not what the protocol says."""


class ExtensionMissing(LeylineError):
    """The server answers, but carries no Leyline extension."""


class ServerError(LeylineError):
    """A typed refusal by the server."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        detail: Mapping[str, Any] | None = None,
        http_status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The field at fault, as a dotted path into the request body (``leyline.edits[3].end``)."""
        self.detail: Mapping[str, Any] = dict(detail or {})
        self.http_status = self.status if http_status is None else http_status

    def __str__(self) -> str:
        where = f" ({self.param})" if self.param else ""
        return f"{self.code}{where}: {self.message}"


class InvalidRequest(ServerError):
    """The body is malformed; ``param`` names the field."""

    status, code = 422, "invalid_request"


class InvalidDirective(InvalidRequest):
    """A directive is out of range, out of order or overlaps another."""

    code = "invalid_directive"


class InvalidEdit(InvalidRequest):
    """An edit names a message, part or span that is not there."""

    code = "invalid_edit"


class UnknownSession(ServerError):
    """The session ended, was never there, or belongs to another cache salt. Send the history without it."""

    status, code = 404, "unknown_session"


class VersionConflict(ServerError):
    """Somebody else moved the session; ``detail["version"]`` says where it stands."""

    status, code = 409, "version_conflict"


class HistoryEdited(ServerError):
    """The history is no extension of what the session holds, and ``on_history_edit`` is ``"error"``."""

    status, code = 409, "history_edited"


class NothingToUndo(ServerError):
    """The session has no earlier view to go back to."""

    status, code = 409, "nothing_to_undo"


class PayloadTooLarge(ServerError):
    """The body is larger than the server takes."""

    status, code = 413, "payload_too_large"


class TooManySessions(ServerError):
    """The server holds as many sessions as it may; end one or wait for a TTL."""

    status, code = 429, "too_many_sessions"


class Unsupported(ServerError):
    """This server, model or request cannot be spliced; ``detail["reason"]`` says what stands in the way."""

    status, code = 501, "unsupported"


class Overloaded(ServerError):
    """The server cannot take the request now."""

    status, code = 503, "overloaded"


class InternalError(ServerError):
    """A fault in the extension. The engine goes on serving."""

    status, code = 500, "internal_error"


class UpstreamError(ServerError):
    """The engine itself refused the request; ``http_status`` and the message are its own."""

    status, code = 502, "upstream_error"


def _subclasses(cls: type[ServerError]) -> list[type[ServerError]]:
    return [cls, *(deeper for sub in cls.__subclasses__() for deeper in _subclasses(sub))]


SERVER_ERRORS: Mapping[str, type[ServerError]] = {cls.code: cls for cls in _subclasses(ServerError)}
"""Server code to exception class, one to one."""


def error_body(error: ServerError) -> dict[str, Any]:
    """The JSON body that carries ``error`` over HTTP."""
    return {
        "error": {
            "type": "leyline_error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "detail": dict(error.detail),
        }
    }


def error_from_body(http_status: int, body: Any) -> ServerError:
    """The exception an error reply stands for; an engine's own error becomes `UpstreamError`."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and error.get("type") == "leyline_error" and error.get("code") in SERVER_ERRORS:
        detail = error.get("detail")
        return SERVER_ERRORS[error["code"]](
            str(error.get("message", "")),
            param=error.get("param"),
            detail=detail if isinstance(detail, dict) else None,
            http_status=http_status,
        )
    source = error if isinstance(error, dict) else body if isinstance(body, dict) else {}
    message = source.get("message") or f"the engine answered with status {http_status}"
    return UpstreamError(str(message), http_status=http_status)
