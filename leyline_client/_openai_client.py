"""A genuine OpenAI client over a session, for frameworks that want one.

The session is the client's HTTP transport: what the framework sends as ``POST …/chat/completions`` becomes a turn, all
else (``GET …/models``) goes to the server as it is. Works with every openai release that takes an httpx client: 1.x
and 2.x are built on it, 3.x still accepts one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from ._errors import (
    ConfigurationError,
    ExtensionMissing,
    LeylineError,
    PolicyError,
    ServerError,
    ServerTimeout,
    TransportError,
    error_body,
)
from ._openai_types import require_openai
from ._outcome import TurnResult
from ._sse import DONE, encode_chunk
from ._tracked import AsyncSessionStream, SessionStream

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from ._async_session import AsyncLeylineSession
    from ._session import LeylineSession


def openai_client(session: LeylineSession) -> OpenAI:
    """``openai.OpenAI`` whose chat requests are turns of ``session``."""
    http: Any = httpx.Client(transport=openai_transport(session))
    openai = require_openai("session.openai")
    client: OpenAI = openai.OpenAI(
        base_url=session.client.base_url + "/v1",
        api_key="leyline",
        http_client=http,
        timeout=session.client._timeout,
        max_retries=0,
    )
    return client


def async_openai_client(session: AsyncLeylineSession) -> AsyncOpenAI:
    """``openai.AsyncOpenAI`` whose chat requests are turns of ``session``."""
    http: Any = httpx.AsyncClient(transport=openai_transport_async(session))
    openai = require_openai("session.openai")
    client: AsyncOpenAI = openai.AsyncOpenAI(
        base_url=session.client.base_url + "/v1",
        api_key="leyline",
        http_client=http,
        timeout=session.client._timeout,
        max_retries=0,
    )
    return client


def openai_transport(session: LeylineSession) -> httpx.BaseTransport:
    """An httpx transport that turns OpenAI chat requests into turns of ``session``."""
    return _Transport(session)


def openai_transport_async(session: AsyncLeylineSession) -> httpx.AsyncBaseTransport:
    """The same for asyncio."""
    return _AsyncTransport(session)


class _Transport(httpx.BaseTransport):
    def __init__(self, session: LeylineSession) -> None:
        self._session = session

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        if not is_chat(request.method, request.url.path):
            return self._session.client._http.send(_forwarded(request, body, self._session.client), stream=True)
        try:
            answer = self._session.take_turn(chat_arguments(body, request.headers, _timeout(request)))
        except LeylineError as error:
            return _refusal(error)
        if isinstance(answer, dict):
            return httpx.Response(200, json=plain_reply(answer))
        return httpx.Response(200, headers=EVENT_STREAM, stream=_Bytes(answer))


class _AsyncTransport(httpx.AsyncBaseTransport):
    def __init__(self, session: AsyncLeylineSession) -> None:
        self._session = session

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        if not is_chat(request.method, request.url.path):
            return await self._session.client._http.send(_forwarded(request, body, self._session.client), stream=True)
        try:
            answer = await self._session.take_turn(chat_arguments(body, request.headers, _timeout(request)))
        except LeylineError as error:
            return _refusal(error)
        if isinstance(answer, dict):
            return httpx.Response(200, json=plain_reply(answer))
        return httpx.Response(200, headers=EVENT_STREAM, stream=_AsyncBytes(answer))


EVENT_STREAM = {"content-type": "text/event-stream"}


class _Bytes(httpx.SyncByteStream):
    def __init__(self, stream: SessionStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            yield encode_chunk(chunk)
        yield DONE

    def close(self) -> None:
        self._stream.close()


class _AsyncBytes(httpx.AsyncByteStream):
    def __init__(self, stream: AsyncSessionStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield encode_chunk(chunk)
        yield DONE

    async def aclose(self) -> None:
        await self._stream.aclose()


def is_chat(method: str, path: str) -> bool:
    """Whether an OpenAI request is a chat turn."""
    return method == "POST" and path.endswith("/chat/completions")


def chat_arguments(body: bytes, headers: Mapping[str, str], timeout: Mapping[str, Any] | None) -> dict[str, Any]:
    """A chat request's body and headers as arguments of a turn. Raises `ConfigurationError` for a bad body."""
    try:
        arguments = json.loads(body)
    except ValueError:
        raise ConfigurationError("the body is no JSON") from None
    if not isinstance(arguments, dict):
        raise ConfigurationError("the body is no JSON object")
    # Only what a caller sets on purpose: the rest are the headers of the framework's own HTTP client.
    arguments["extra_headers"] = {
        name: value
        for name, value in headers.items()
        if name.lower().startswith("x-") and not name.lower().startswith("x-stainless")
    }
    if timeout is not None:
        arguments["timeout"] = httpx.Timeout(**timeout)
    return arguments


def plain_reply(answer: dict[str, Any]) -> dict[str, Any]:
    """A reply as JSON."""
    result = answer.get("leyline")
    if not isinstance(result, TurnResult):
        return answer
    return {**answer, "leyline": result_object(result)}


def result_object(result: TurnResult) -> dict[str, Any]:
    """A turn's result as JSON: the protocol's ``leyline`` object."""
    return {"session": result.session, "version": result.version, "receipt": result.receipt.model_dump(mode="json")}


def error_reply(error: LeylineError) -> tuple[int, dict[str, Any]]:
    """The HTTP status and body that stand for an error of a turn, in OpenAI's shape."""
    if isinstance(error, ServerError):
        return error.http_status, error_body(error)
    status, code = 500, "error"
    for kind, its_status, its_code in _STATUS:
        if isinstance(error, kind):
            status, code = its_status, its_code
            break
    return status, {"error": {"type": "leyline_error", "code": code, "message": str(error), "param": None}}


_STATUS: tuple[tuple[type[LeylineError], int, str], ...] = (
    (ConfigurationError, 400, "configuration"),
    (PolicyError, 422, "policy"),
    (ExtensionMissing, 501, "extension_missing"),
    (ServerTimeout, 504, "timeout"),
    (TransportError, 502, "unreachable"),
)


def _refusal(error: LeylineError) -> httpx.Response:
    if isinstance(error, TransportError) and isinstance(error.__cause__, httpx.TransportError):
        # OpenAI's client has its own errors for these.
        raise error.__cause__
    status, body = error_reply(error)
    return httpx.Response(status, json=body)


def _timeout(request: httpx.Request) -> Mapping[str, Any] | None:
    timeout = request.extensions.get("timeout")
    return timeout if isinstance(timeout, Mapping) else None


def _forwarded(request: httpx.Request, body: bytes, client: Any) -> httpx.Request:
    path = request.url.raw_path.decode()
    url = client.base_url + path[path.index("/v1") :] if "/v1" in path else client.base_url + path
    headers = {**client._headers, "content-type": request.headers.get("content-type", "application/json")}
    return httpx.Request(request.method, url, headers=headers, content=body, extensions=request.extensions)
