"""Replies of any OpenAI-shaped client as plain data: whole, or put together from a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


class ReplyError(RuntimeError):
    """The reply is not a chat completion."""


@dataclass(frozen=True)
class TimedReply:
    """A chat completion as a plain dict, with when it came. ``ttft_ms`` is None where it cannot be known."""

    body: dict[str, Any]
    ttft_ms: float | None
    total_ms: float


def plain(value: Any) -> dict[str, Any]:
    """A reply or chunk (a dict, or anything with pydantic's ``model_dump``) as a dict.

    A ``leyline`` attribute beside the dumped fields is added under that name.

    Raises:
        ReplyError: for anything else.
    """
    if isinstance(value, dict):
        return value
    if not hasattr(value, "model_dump"):
        raise ReplyError(f"a chat completion is expected, not {type(value).__name__}")
    body: dict[str, Any] = value.model_dump()
    result = getattr(value, "leyline", None)
    return body if result is None else {**body, "leyline": _turn_result(result)}


def _turn_result(value: Any) -> Any:
    """What became of a turn, as JSON: a dict, a model, or the session's dataclass that holds a model."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _turn_result(getattr(value, field.name)) for field in fields(value)}
    return value


def timed_reply(create: Any, request: dict[str, Any], *, stream: bool) -> TimedReply:
    """Call ``create(**request)`` and time it, in milliseconds.

    The time to first token is measured when streaming; without a stream it is known only where a single token was
    asked for, as the whole time.

    Raises:
        ReplyError: when what comes back is not a chat completion.
    """
    started = time.perf_counter()
    if stream:
        chunks = create(**request, stream=True, stream_options={"include_usage": True})
        body, first = assemble(chunks, time.perf_counter)
        if body.get("leyline") is None and getattr(chunks, "leyline", None) is not None:
            body["leyline"] = _turn_result(chunks.leyline)  # a session takes it out of the chunks
        total = time.perf_counter() - started
        ttft = None if first is None else (first - started) * 1000
    else:
        body = plain(create(**request))
        total = time.perf_counter() - started
        ttft = total * 1000 if request.get("max_tokens") == 1 else None
    if not isinstance(body.get("choices"), list) or not body["choices"]:
        raise ReplyError("the reply has no choices")
    return TimedReply(body, None if ttft is None else round(ttft, 3), round(total * 1000, 3))


def assemble(chunks: Iterable[Any], clock: Any) -> tuple[dict[str, Any], float | None]:
    """Put a stream of chunks together; returns the completion and ``clock()`` at its first piece of text or call."""
    body: dict[str, Any] = {"object": "chat.completion", "usage": None}
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    finish, first = None, None
    for chunk in map(plain, chunks):
        body.update({key: chunk[key] for key in ("id", "model", "created", "usage", "leyline") if chunk.get(key)})
        for choice in chunk.get("choices") or []:
            if choice.get("index", 0) != 0:
                continue
            finish = choice.get("finish_reason") or finish
            if _add_delta(message, calls, choice.get("delta") or {}) and first is None:
                first = clock()
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    body["choices"] = [{"index": 0, "message": message, "finish_reason": finish}]
    return body, first


def _add_delta(message: dict[str, Any], calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> bool:
    """Add one delta; returns whether it brought any token."""
    brought = False
    for field in ("content", "reasoning_content"):
        if delta.get(field):
            message[field] = (message.get(field) or "") + delta[field]
            brought = True
    for piece in delta.get("tool_calls") or []:
        empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(piece.get("index", 0), empty)
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
        brought = True
    return brought
