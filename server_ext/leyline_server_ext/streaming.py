"""The engine's server-sent events, with the turn's receipt as last chunk."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse

from leyline_client._models import TurnInfo

_DONE = "data: [DONE]"


class TurnStream(StreamingResponse):
    """Streams an engine reply and closes the turn, also when the client goes away before the first chunk.

    Args:
        inner: the engine's streaming response.
        finish: called when the reply is complete; returns what the last chunk carries.
        release: called exactly once, whatever happens.
    """

    def __init__(self, inner: StreamingResponse, finish: Callable[[], TurnInfo], release: Callable[[], None]) -> None:
        super().__init__(
            self._with_receipt(inner.body_iterator, finish),
            status_code=inner.status_code,
            media_type=inner.media_type,
            background=inner.background,
        )
        self._release: Callable[[], None] | None = release

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Stream, then release, whether or not anything was streamed."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            release, self._release = self._release, None
            if release is not None:
                release()

    @staticmethod
    async def _with_receipt(chunks: AsyncIterator[Any], finish: Callable[[], TurnInfo]) -> AsyncIterator[str]:
        template: dict[str, Any] = {}
        failed = False
        async for chunk in chunks:
            text = chunk.decode() if isinstance(chunk, bytes) else str(chunk)
            if text.startswith(_DONE):
                if not failed:
                    event = {**template, "choices": [], "leyline": finish().model_dump(mode="json")}
                    yield f"data: {json.dumps(event)}\n\n"
                yield text
                continue
            failed = failed or text.startswith('data: {"error"')
            if not template:
                template = _frame(text)
            yield text


def _frame(text: str) -> dict[str, Any]:
    """What all chunks of a reply share: id, model and so on."""
    try:
        first = json.loads(text.removeprefix("data: "))
    except ValueError:
        return {}
    return {k: first[k] for k in ("id", "object", "created", "model") if k in first}
