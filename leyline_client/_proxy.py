"""An OpenAI-compatible base URL whose chat requests are turns of a session: for agents that only take a URL.

::

    agent ──POST /v1/chat/completions──▶ proxy ──policies, session──▶ SGLang + Leyline
          ──anything else─────────────▶  passed on as it is

Conversations are recognised by their history, or named by the header ``x-leyline-conversation``.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ._async_session import AsyncLeylineSession
from ._errors import LeylineError
from ._http import HTTPX_ERRORS, map_error
from ._models import Receipt
from ._openai_client import chat_arguments, error_reply, plain_reply
from ._sse import DONE, encode_chunk
from ._tracked import AsyncSessionStream

log = logging.getLogger("leyline.proxy")

STATS_PATH = "/leyline/proxy/stats"
_HOP_BY_HOP = {
    "connection",
    "content-encoding",
    "content-length",
    "host",
    "keep-alive",
    "te",
    "transfer-encoding",
    "upgrade",
}


def make_app(session: AsyncLeylineSession, *, key: str | None = None) -> Starlette:
    """The proxy as an ASGI application; it closes the session when it is shut down.

    ``key``: what clients must bring as ``Authorization: Bearer …``; None lets everyone in.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await session.aclose()

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if key is not None and not _holds(request, key):
                return JSONResponse({"error": {"message": "a valid API key is needed", "type": "auth"}}, 401)
            try:
                return await answer(request)
            except LeylineError as error:
                status, body = error_reply(error)
                log.warning("%s: %s", type(error).__name__, body["error"]["code"])
                return JSONResponse(body, status)

        return endpoint

    async def chat(request: Request) -> Response:
        answer = await session.take_turn(chat_arguments(await request.body(), request.headers, None))
        if isinstance(answer, dict):
            return JSONResponse(plain_reply(answer))
        return StreamingResponse(_events(answer), media_type="text/event-stream")

    async def stats(_: Request) -> Response:
        return JSONResponse(_totals(session))

    async def other(request: Request) -> Response:
        return await _forward(session, request)

    routes = [
        Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
        Route("/chat/completions", guarded(chat), methods=["POST"]),
        Route(STATS_PATH, guarded(stats), methods=["GET"]),
        Route("/{path:path}", guarded(other), methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def log_receipt(receipt: Receipt) -> None:
    """One line per turn; never prompt text."""
    reason = f" ({receipt.reason})" if receipt.reason else ""
    log.info(
        "%s%s: %d prompt tokens, %d cached, %d rotated, %d prefilled",
        receipt.executed,
        reason,
        receipt.prompt_tokens,
        receipt.cached_tokens,
        receipt.rotated_tokens,
        receipt.prefilled_tokens,
    )


def _holds(request: Request, key: str) -> bool:
    given = request.headers.get("authorization", "").encode()
    return hmac.compare_digest(given, f"Bearer {key}".encode())


async def _events(stream: AsyncSessionStream) -> AsyncIterator[bytes]:
    try:
        async for chunk in stream:
            yield encode_chunk(chunk)
        yield DONE
    except LeylineError as error:
        # The status line is long gone: OpenAI's clients read an error out of an event as well.
        yield encode_chunk(error_reply(error)[1])
    finally:
        await stream.aclose()


async def _forward(session: AsyncLeylineSession, request: Request) -> Response:
    client = session.client
    url = client.base_url + request.url.path
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
    if "authorization" in client._headers:
        headers["authorization"] = client._headers["authorization"]
    try:
        response = await client._http.request(
            request.method, url, params=request.url.query, headers=headers, content=await request.body(), timeout=None
        )
    except HTTPX_ERRORS as error:
        raise map_error(error, url) from error
    return Response(response.content, response.status_code, _returned(response))


def _returned(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.lower() not in _HOP_BY_HOP}


def _totals(session: AsyncLeylineSession) -> dict[str, Any]:
    stats = session.stats
    names = ("turns", "edits", "retries", "prompt_tokens", "cached_tokens", "rotated_tokens", "prefilled_tokens")
    return {
        **{name: getattr(stats, name) for name in names},
        "estimated_tokens_kept_out": stats.estimated_tokens_kept_out,
        "executed": {name.value: count for name, count in stats.executed.items()},
        "reasons": {name.value: count for name, count in stats.reasons.items()},
    }
