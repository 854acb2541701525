"""`LeylineClient` and `AsyncLeylineClient`: the wire protocol as methods, one request each, no retries and no state."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import httpx

from . import _calls, _vocabulary
from ._calls import Call, Message
from ._errors import Unsupported
from ._http import (
    DEFAULT_TIMEOUT,
    HTTPX_ERRORS,
    Reply,
    Request,
    Timeout,
    default_headers,
    map_error,
    raise_for_reply,
    root_url,
)
from ._models import Edit, TurnInfo, TurnOptions
from ._streams import AsyncChunkStream, ChunkStream
from ._wire import PlanReply, RenderReply, ServerInfo, SessionView, SpliceReply, SpliceRequest, TokenizerInfo
from .policy import TokenCounter

T = TypeVar("T")


class _Base:
    """What does not depend on how bytes travel."""

    def __init__(self, base_url: str | httpx.URL, api_key: str | None, timeout: Timeout) -> None:
        self.base_url = root_url(base_url)
        """The server's root, without a trailing slash and without ``/v1``."""
        self._headers = default_headers(api_key)
        self._timeout = timeout

    def _arguments(self, request: Request) -> dict[str, Any]:
        timeout = self._timeout if request.timeout is DEFAULT_TIMEOUT else request.timeout
        return {
            "method": request.method,
            "url": self.base_url + request.path,
            "content": request.content,
            "headers": {**self._headers, **request.headers},
            "params": dict(request.query) or None,
            "timeout": timeout,
        }


class LeylineClient(_Base):
    """The protocol over httpx.

    Args:
        base_url: The server's root (``http://127.0.0.1:30000``); an OpenAI-style ``…/v1`` is understood too.
        api_key: The key SGLang was started with, if any.
        timeout: Of generating requests, in seconds; by default 5 s to connect and no limit for reading.
        transport: An httpx transport, e.g. ``leyline_client.testing.FakeServer().transport``.
        http_client: A whole httpx client instead; it is not closed by this one.

    Every method raises `TransportError` where no usable answer comes, `ExtensionMissing` where the server has no
    Leyline, `ServerError` for a typed refusal, and `ConfigurationError` for arguments that cannot be sent.
    """

    def __init__(
        self,
        base_url: str | httpx.URL,
        *,
        api_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        transport: httpx.BaseTransport | None = None,
        http_client: httpx.Client | None = None,
    ) -> None:
        super().__init__(base_url, api_key, timeout)
        self._owned = http_client is None
        self._http = http_client or httpx.Client(transport=transport, follow_redirects=True, limits=_LIMITS)

    def info(self) -> ServerInfo:
        """What the server is and can do: the handshake."""
        return self._call(_calls.info())

    def tokenizer(self) -> TokenizerInfo:
        """The served model's vocabulary. Raises `Unsupported` where it is no byte-level BPE."""
        return self._call(_calls.tokenizer())

    def token_counter(self) -> TokenCounter:
        """Counts texts exactly as the served model's tokenizer does, without asking the server again.

        The vocabulary is fetched once and kept on disk. Where it is no byte-level BPE, or tiktoken is not installed,
        this is the estimate, with ``exact`` False and the reason in its ``name``.
        """
        try:
            wanted = self.tokenizer()
        except Unsupported as refusal:
            return _vocabulary.estimate(refusal)
        content = _vocabulary.cached(wanted)
        if content is None:
            content = self._call(_calls.vocabulary(wanted))
            _vocabulary.keep(wanted, content)
        return _vocabulary.counter(content)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        edits: Sequence[Edit] = (),
        return_token_ids: bool = True,
    ) -> RenderReply:
        """The tokens the server's chat template makes of ``messages``, and where each text ended up in them."""
        arguments = (chat_template_kwargs, add_generation_prompt, edits, return_token_ids)
        return self._call(_calls.render(messages, tools, *arguments))

    def plan(self, body: Mapping[str, Any] | SpliceRequest, *, options: TurnOptions | None = None) -> PlanReply:
        """The receipt a turn would get now, and whether its edits pay. Changes nothing."""
        return self._call(_calls.plan(body, options))

    def splice(self, request: SpliceRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> SpliceReply:
        """A token-level turn."""
        return self._call(_calls.splice(request, timeout))

    @overload
    def chat_completions(
        self,
        body: Mapping[str, Any],
        *,
        options: TurnOptions | None = ...,
        stream: Literal[False] = ...,
        timeout: Timeout = ...,
    ) -> dict[str, Any]: ...
    @overload
    def chat_completions(
        self,
        body: Mapping[str, Any],
        *,
        options: TurnOptions | None = ...,
        stream: Literal[True],
        timeout: Timeout = ...,
    ) -> ChunkStream: ...
    def chat_completions(
        self,
        body: Mapping[str, Any],
        *,
        options: TurnOptions | None = None,
        stream: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> dict[str, Any] | ChunkStream:
        """A message-level turn: an OpenAI body in, an OpenAI reply with a ``leyline`` object out.

        ``stream`` decides, whatever ``body["stream"]`` says; the last chunk of a stream carries the ``leyline`` object.
        """
        call = _calls.chat({**body, "stream": stream}, options, timeout)
        return self._open(call.request) if stream else self._call(call)

    def undo(self, session: str, *, expected_version: int | None = None, cache_salt: str | None = None) -> TurnInfo:
        """Make the view before the last edit current again."""
        return self._call(_calls.undo(session, expected_version, cache_salt))

    def purge(self, session: str, *, expected_version: int | None = None, cache_salt: str | None = None) -> TurnInfo:
        """Drop everything that carries evicted influence."""
        return self._call(_calls.purge(session, expected_version, cache_salt))

    def get_session(self, session: str, *, cache_salt: str | None = None) -> SessionView:
        """Where a session stands."""
        return self._call(_calls.get_session(session, cache_salt))

    def delete_session(self, session: str, *, cache_salt: str | None = None) -> None:
        """End a session and release what only it held."""
        self._call(_calls.delete_session(session, cache_salt))

    def close(self) -> None:
        """Close the connections, where this client opened them."""
        if self._owned:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, call: Call[T]) -> T:
        return call.parse(self._send(call.request))

    def _send(self, request: Request) -> Reply:
        arguments = self._arguments(request)
        try:
            response = self._http.request(**arguments)
        except HTTPX_ERRORS as error:
            raise map_error(error, arguments["url"]) from error
        reply = Reply(response.status_code, response.content)
        raise_for_reply(request, reply)
        return reply

    def _open(self, request: Request) -> ChunkStream:
        arguments = self._arguments(request)
        timeout = arguments.pop("timeout")
        try:
            response = self._http.send(self._http.build_request(**arguments, timeout=timeout), stream=True)
            if response.status_code >= 400:
                try:
                    raise_for_reply(request, Reply(response.status_code, response.read()))
                finally:
                    response.close()
        except HTTPX_ERRORS as error:
            raise map_error(error, arguments["url"]) from error
        return ChunkStream(response, arguments["url"])


class AsyncLeylineClient(_Base):
    """`LeylineClient` for asyncio: the same arguments, methods and errors."""

    def __init__(
        self,
        base_url: str | httpx.URL,
        *,
        api_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(base_url, api_key, timeout)
        self._owned = http_client is None
        self._http = http_client or httpx.AsyncClient(transport=transport, follow_redirects=True, limits=_LIMITS)

    async def info(self) -> ServerInfo:
        """What the server is and can do: the handshake."""
        return await self._call(_calls.info())

    async def tokenizer(self) -> TokenizerInfo:
        """The served model's vocabulary. Raises `Unsupported` where it is no byte-level BPE."""
        return await self._call(_calls.tokenizer())

    async def token_counter(self) -> TokenCounter:
        """Counts texts exactly as the served model's tokenizer does. See `LeylineClient.token_counter`."""
        try:
            wanted = await self.tokenizer()
        except Unsupported as refusal:
            return _vocabulary.estimate(refusal)
        content = await asyncio.to_thread(_vocabulary.cached, wanted)
        if content is None:
            content = await self._call(_calls.vocabulary(wanted))
            await asyncio.to_thread(_vocabulary.keep, wanted, content)
        return await asyncio.to_thread(_vocabulary.counter, content)

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        edits: Sequence[Edit] = (),
        return_token_ids: bool = True,
    ) -> RenderReply:
        """The tokens the server's chat template makes of ``messages``, and where each text ended up in them."""
        arguments = (chat_template_kwargs, add_generation_prompt, edits, return_token_ids)
        return await self._call(_calls.render(messages, tools, *arguments))

    async def plan(self, body: Mapping[str, Any] | SpliceRequest, *, options: TurnOptions | None = None) -> PlanReply:
        """The receipt a turn would get now, and whether its edits pay. Changes nothing."""
        return await self._call(_calls.plan(body, options))

    async def splice(self, request: SpliceRequest, *, timeout: Timeout = DEFAULT_TIMEOUT) -> SpliceReply:
        """A token-level turn."""
        return await self._call(_calls.splice(request, timeout))

    @overload
    async def chat_completions(
        self,
        body: Mapping[str, Any],
        *,
        options: TurnOptions | None = ...,
        stream: Literal[False] = ...,
        timeout: Timeout = ...,
    ) -> dict[str, Any]: ...
    @overload
    async def chat_completions(
        self,
        body: Mapping[str, Any],
        *,
        options: TurnOptions | None = ...,
        stream: Literal[True],
        timeout: Timeout = ...,
    ) -> AsyncChunkStream: ...
    async def chat_completions(
        self,
        body: Mapping[str, Any],
        *,
        options: TurnOptions | None = None,
        stream: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> dict[str, Any] | AsyncChunkStream:
        """A message-level turn: an OpenAI body in, an OpenAI reply with a ``leyline`` object out."""
        call = _calls.chat({**body, "stream": stream}, options, timeout)
        if stream:
            return await self._open(call.request)
        return await self._call(call)

    async def undo(
        self, session: str, *, expected_version: int | None = None, cache_salt: str | None = None
    ) -> TurnInfo:
        """Make the view before the last edit current again."""
        return await self._call(_calls.undo(session, expected_version, cache_salt))

    async def purge(
        self, session: str, *, expected_version: int | None = None, cache_salt: str | None = None
    ) -> TurnInfo:
        """Drop everything that carries evicted influence."""
        return await self._call(_calls.purge(session, expected_version, cache_salt))

    async def get_session(self, session: str, *, cache_salt: str | None = None) -> SessionView:
        """Where a session stands."""
        return await self._call(_calls.get_session(session, cache_salt))

    async def delete_session(self, session: str, *, cache_salt: str | None = None) -> None:
        """End a session and release what only it held."""
        await self._call(_calls.delete_session(session, cache_salt))

    async def aclose(self) -> None:
        """Close the connections, where this client opened them."""
        if self._owned:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _call(self, call: Call[T]) -> T:
        return call.parse(await self._send(call.request))

    async def _send(self, request: Request) -> Reply:
        arguments = self._arguments(request)
        try:
            response = await self._http.request(**arguments)
        except HTTPX_ERRORS as error:
            raise map_error(error, arguments["url"]) from error
        reply = Reply(response.status_code, response.content)
        raise_for_reply(request, reply)
        return reply

    async def _open(self, request: Request) -> AsyncChunkStream:
        arguments = self._arguments(request)
        try:
            response = await self._http.send(self._http.build_request(**arguments), stream=True)
            if response.status_code >= 400:
                try:
                    raise_for_reply(request, Reply(response.status_code, await response.aread()))
                finally:
                    await response.aclose()
        except HTTPX_ERRORS as error:
            raise map_error(error, arguments["url"]) from error
        return AsyncChunkStream(response, arguments["url"])


_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
"""The server queues, not the client: many agents may wait on long generations at once."""
