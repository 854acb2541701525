"""The HTTP routes under ``/leyline/v1`` (docs/protocol.md), added to SGLang's own FastAPI application."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from leyline_client._errors import InternalError, InvalidRequest, PayloadTooLarge, ServerError, error_body
from leyline_client._wire import RenderRequest, SessionRequest, SpliceRequest

from .chats import render as render_messages
from .openapi import operations
from .service import Service
from .sessions import Session
from .validation import parse

logger = logging.getLogger(__name__)

PREFIX = "/leyline/v1"
MAX_BODY_BYTES = 64 << 20
Handler = Callable[[Any], Awaitable[Any]]


def install_routes(app: Any) -> None:
    """Add the routes. The service behind them is built on the first request, when the engine is up."""
    holder: list[Service] = []

    def service() -> Service:
        if not holder:
            holder.append(Service.of_running_server())
        return holder[0]

    described = operations()
    for (method, path), handler in _table(service).items():
        app.add_api_route(
            PREFIX + path,
            _endpoint(handler, lambda error: service().metrics.refused(error)),
            methods=[method],
            name=f"leyline {method} {path}",
            operation_id=f"leyline_{method}_{path.strip('/').replace('/', '_')}".lower(),
            response_model=None,
            status_code=204 if "204" in described[method, path]["responses"] else 200,
            openapi_extra=described[method, path],
            tags=["leyline"],
        )


def _table(service: Callable[[], Service]) -> dict[tuple[str, str], Handler]:
    """The handler of every ``(method, path)``."""

    async def info(_request: Any) -> Any:
        return service().info()

    async def tokenizer(_request: Any) -> Any:
        return await service().vocabularies.info()

    async def vocabulary(request: Any) -> Any:
        return _immutable(await service().vocabularies.content(request.path_params["digest"]))

    async def render(request: Any) -> Any:
        wanted = parse(RenderRequest, await read_body(request))
        return render_messages(service().serving, service().engine.manager.tokenizer, wanted)

    async def plan(request: Any) -> Any:
        return await service().plan(await read_body(request))

    async def splice(request: Any) -> Any:
        return await service().splice(parse(SpliceRequest, await read_body(request)), request)

    async def chat(request: Any) -> Any:
        return await service().chat(await read_body(request), request)

    async def view(request: Any) -> Any:
        return service().view(_named(service(), request))

    async def delete(request: Any) -> Any:
        return await service().delete(_named(service(), request))

    async def undo(request: Any) -> Any:
        return await service().undo(_named(service(), request), await _version(request))

    async def purge(request: Any) -> Any:
        return await service().purge(_named(service(), request), await _version(request))

    session = "/sessions/{session_id}"
    return {
        ("GET", "/info"): info,
        ("GET", "/tokenizer"): tokenizer,
        ("GET", "/tokenizer/{digest}"): vocabulary,
        ("POST", "/render"): render,
        ("POST", "/plan"): plan,
        ("POST", "/splice"): splice,
        ("POST", "/chat/completions"): chat,
        ("GET", session): view,
        ("DELETE", session): delete,
        ("POST", f"{session}/undo"): undo,
        ("POST", f"{session}/purge"): purge,
    }


def _immutable(content: bytes) -> Any:
    """JSON that its address names by content: it may be cached for ever."""
    from fastapi.responses import Response

    return Response(content, media_type="application/json", headers={"cache-control": "private, immutable"})


def _named(service: Service, request: Any) -> Session:
    return service.sessions.get(request.path_params["session_id"], request.query_params.get("cache_salt"))


async def _version(request: Any) -> int | None:
    return parse(SessionRequest, await read_body(request, empty=True)).expected_version


async def read_body(request: Any, *, empty: bool = False) -> dict[str, Any]:
    """The JSON object in a request's body; with ``empty`` nothing at all is an empty one.

    Raises:
        PayloadTooLarge: more than `MAX_BODY_BYTES`; the rest is not read.
        InvalidRequest: no JSON object.
    """
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"the body exceeds {MAX_BODY_BYTES} bytes", detail={"limit": MAX_BODY_BYTES})
    if empty and not raw:
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not JSON") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object")
    return body


def _endpoint(handler: Handler, refused: Callable[[ServerError], None]) -> Any:
    """The handler with its answer and its typed errors turned into JSON."""
    from fastapi import Request
    from fastapi.responses import JSONResponse, Response

    async def endpoint(request: Request) -> Response:
        try:
            result = await handler(request)
        except ServerError as error:
            refused(error)
            return JSONResponse(error_body(error), status_code=error.http_status)
        except Exception:
            # Never the exception's text: it may quote the prompt.
            logger.exception("leyline: fault in %s", request.scope.get("route", handler))
            return JSONResponse(
                error_body(InternalError("a fault in the extension; the server's log has it")), status_code=500
            )
        if isinstance(result, Response):
            return result
        if result is None:
            return Response(status_code=204)
        return JSONResponse(result.model_dump(mode="json") if hasattr(result, "model_dump") else result)

    endpoint.__annotations__ = {"request": Request, "return": Response}
    return endpoint
