"""What both clients need of HTTP: requests, replies, timeouts, and the mapping of httpx's errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from ._errors import (
    ConfigurationError,
    ExtensionMissing,
    LeylineError,
    ProtocolError,
    ServerTimeout,
    ServerUnreachable,
    UpstreamError,
    error_from_body,
)
from ._version import __version__

PREFIX = "/leyline/v1"
"""Where the extension's routes live below the server's base URL."""

Timeout: TypeAlias = "float | httpx.Timeout | None"
"""Seconds for every phase, httpx's own object, or None for no limit at all."""

DEFAULT_TIMEOUT = httpx.Timeout(connect=5.0, read=None, write=60.0, pool=60.0)
"""Seconds. A long prompt and answer may take minutes, so reading waits; a server that is not there is given up on."""
SHORT_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
"""Seconds, for the routes that generate nothing."""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, before any transport is involved. ``path`` is relative to the server's base URL."""

    method: str
    path: str
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    timeout: Timeout = field(default_factory=lambda: DEFAULT_TIMEOUT)
    stream: bool = False

    @property
    def is_extension(self) -> bool:
        """Whether the request goes to a route of the extension."""
        return self.path.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP reply."""

    status: int
    content: bytes

    def json(self) -> Any:
        """The decoded body. Raises `ProtocolError` where it is no JSON."""
        try:
            return json.loads(self.content)
        except ValueError:
            raise ProtocolError(f"the server answered {self.status} with a body that is not JSON") from None


def root_url(base_url: str | httpx.URL) -> str:
    """The server's root: no trailing slash, and without the ``/v1`` that OpenAI clients are given.

    Raises:
        ConfigurationError: no ``http`` or ``https`` URL with a host.
    """
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"base_url {base_url!r} is no URL: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigurationError(f"base_url must be an http or https URL with a host, not {str(base_url)!r}")
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")


def default_headers(api_key: str | None) -> dict[str, str]:
    """Headers every request of a client carries."""
    headers = {"user-agent": f"leyline-client/{__version__}", "accept": "application/json, text/event-stream"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    return headers


def as_timeout(value: Any) -> Timeout:
    """What a caller gave as a timeout, also another HTTP library's timeout object, in httpx's terms."""
    if value is None or isinstance(value, int | float | httpx.Timeout):
        return value
    as_dict = getattr(value, "as_dict", None)
    if callable(as_dict):
        return httpx.Timeout(**as_dict())
    raise ConfigurationError(f"timeout must be seconds, an httpx.Timeout or None, not {type(value).__name__}")


def map_error(error: Exception, where: str) -> LeylineError:
    """The error of this library that stands for one of httpx's; ``where`` is the URL that was asked.

    Every exception class httpx has is covered (a test enumerates them).
    """
    text = f"{where}: {error}" if str(error) else f"{where}: {type(error).__name__}"
    if isinstance(error, httpx.TimeoutException):
        return ServerTimeout(text)
    if isinstance(
        error, httpx.InvalidURL | httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.CookieConflict
    ):
        return ConfigurationError(text)
    if isinstance(error, httpx.DecodingError | httpx.TooManyRedirects | httpx.HTTPStatusError):
        return ProtocolError(text)
    if isinstance(error, httpx.HTTPError | httpx.StreamError):
        return ServerUnreachable(text)
    raise error


HTTPX_ERRORS = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, httpx.CookieConflict)
"""The roots of httpx's exceptions: what `map_error` takes."""


def raise_for_reply(request: Request, reply: Reply) -> None:
    """Raise the typed error that a reply of status 400 or more stands for.

    Raises:
        ExtensionMissing: a route of the extension is not there.
        ServerError: a refusal, by the extension or by the engine itself.
    """
    if reply.status < 400:
        return
    try:
        body = json.loads(reply.content)
    except ValueError:
        body = None
    error = error_from_body(reply.status, body)
    unknown = request.is_extension and reply.status in {404, 405} and isinstance(error, UpstreamError)
    # Of the engine's own 404s only that of a chat may mean something else: a model it does not serve.
    if unknown and (request.path.endswith("/info") or not _is_refusal(body)):
        raise ExtensionMissing(MISSING)
    raise error


MISSING = (
    "the server answers, but has no Leyline extension: install leyline-client beside SGLang and start it with "
    "--radix-cache-backend leyline (see `leyline doctor`), or use LeylineSession(..., strategy='fallback')"
)


def _is_refusal(body: Any) -> bool:
    """Whether an engine's 404 refuses what was asked, rather than saying that nobody knows the route."""
    return isinstance(body, dict) and ("error" in body or body.get("object") == "error")
