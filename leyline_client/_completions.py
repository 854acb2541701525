"""``session.chat.completions``: the shape of OpenAI's client over a session's turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from . import _openai_types as types
from ._tracked import AsyncSessionStream, SessionStream

Turn = Callable[[Mapping[str, Any]], "dict[str, Any] | SessionStream"]
AsyncTurn = Callable[[Mapping[str, Any]], Awaitable["dict[str, Any] | AsyncSessionStream"]]


class _Delegating:
    """Everything but ``create`` (``parse``, ``stream``, ``with_raw_response``) is that of a genuine OpenAI client."""

    def __init__(self, genuine: Callable[[], Any]) -> None:
        self._genuine = genuine

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._genuine(), name)


class ChatNamespace(_Delegating):
    """``session.chat``."""

    def __init__(self, turn: Turn, genuine: Callable[[], Any]) -> None:
        super().__init__(genuine)
        self.completions = Completions(turn, lambda: genuine().completions)


class Completions(_Delegating):
    """``session.chat.completions``."""

    def __init__(self, turn: Turn, genuine: Callable[[], Any]) -> None:
        super().__init__(genuine)
        self._turn = turn

    def create(self, *, messages: Any, model: str, **arguments: Any) -> Any:
        """One turn. Takes and returns what OpenAI's ``create`` does; the reply's ``leyline`` is a `TurnResult`."""
        answer = self._turn({"model": model, **arguments, "messages": messages})
        return types.completion(answer) if isinstance(answer, dict) else types.stream(answer)


class AsyncChatNamespace(_Delegating):
    """``session.chat`` of an `AsyncLeylineSession`."""

    def __init__(self, turn: AsyncTurn, genuine: Callable[[], Any]) -> None:
        super().__init__(genuine)
        self.completions = AsyncCompletions(turn, lambda: genuine().completions)


class AsyncCompletions(_Delegating):
    """``session.chat.completions`` of an `AsyncLeylineSession`."""

    def __init__(self, turn: AsyncTurn, genuine: Callable[[], Any]) -> None:
        super().__init__(genuine)
        self._turn = turn

    async def create(self, *, messages: Any, model: str, **arguments: Any) -> Any:
        """One turn. Takes and returns what OpenAI's ``create`` does; the reply's ``leyline`` is a `TurnResult`."""
        answer = await self._turn({"model": model, **arguments, "messages": messages})
        return types.completion(answer) if isinstance(answer, dict) else types.async_stream(answer)
