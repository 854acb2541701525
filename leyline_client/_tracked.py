"""Streams of a session: the chunks OpenAI's would hold, with the receipt taken out on the way."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

from ._conversation import Conversation
from ._errors import ProtocolError
from ._outcome import TurnResult
from ._replay import MessageAssembler
from ._streams import AsyncChunkStream, ChunkStream
from ._turn import Answer, count_unanswered

Complete = Callable[[Conversation, Answer, dict[str, Any]], TurnResult]


class Tracker:
    """Watches the chunks of one turn. No I/O."""

    def __init__(self, conversation: Conversation, answer: Answer, complete: Complete) -> None:
        self.result: TurnResult | None = None
        self._conversation, self._answer, self._complete = conversation, answer, complete
        self._usage: Any = None
        self._finished: set[int] = set()
        self._open: set[int] = set()
        self._assembler = MessageAssembler()
        self._over = False

    @property
    def all_finished(self) -> bool:
        """Every choice has its finish reason: only usage and the receipt are still to come."""
        return bool(self._finished) and self._open <= self._finished

    def feed(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk to pass on; None for one that only the session asked for."""
        self._assembler.feed(chunk)
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            self._open.add(index)
            if choice.get("finish_reason") is not None:
                self._finished.add(index)
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        if "leyline" in chunk:
            self._settle(chunk)
            chunk = {name: value for name, value in chunk.items() if name != "leyline"}
            # Agent loops take choices[0] of every chunk: an empty one would be an error that OpenAI's never made.
            return chunk if chunk.get("choices") or chunk.get("usage") else None
        if self._answer.usage_added and not chunk.get("choices") and chunk.get("usage"):
            return None
        return chunk

    def end(self) -> None:
        """The stream came to its end. Raises `ProtocolError` where it held no receipt."""
        if self.result is None and (self._answer.plain is not None or self._answer.observed):
            self._settle({"usage": self._usage})
        if self.result is None:
            self.abandon()
            raise ProtocolError("the stream ended without its leyline object")
        self._leave()

    def abandon(self) -> None:
        """The stream will not be read to its end: whether the server completed the turn is not known."""
        if not self._over and self.result is None and not self._answer.overtaken:
            count_unanswered(self._conversation)
        self._leave()

    def overtake(self) -> None:
        """A later turn of the conversation begins: this one has no say any more about where the session stands."""
        self.abandon()
        self._answer.overtaken = True

    def _settle(self, data: dict[str, Any]) -> None:
        data = {**data, "choices": [{"message": message} for message in self._assembler.messages()]}
        self.result = self._complete(self._conversation, self._answer, data)

    def _leave(self) -> None:
        self._over = True
        if self._conversation.stream is not None and self._conversation.stream.tracker is self:
            self._conversation.stream = None


class SessionStream:
    """Chunks of one turn as dicts. Leaving early: `close`, or ``with``."""

    def __init__(self, raw: ChunkStream, tracker: Tracker) -> None:
        self.raw, self.tracker = raw, tracker
        self._reading = threading.Lock()

    @property
    def leyline(self) -> TurnResult | None:
        """What the turn came to; None before the stream has ended."""
        return self.tracker.result

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        with self._reading:
            try:
                for chunk in self.raw:
                    passed = self.tracker.feed(chunk)
                    if passed is not None:
                        return passed
                self.tracker.end()
            except BaseException:
                self.tracker.abandon()
                raise
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the stream. Where the answer is complete its receipt is still read; otherwise the server stops."""
        try:
            if self.tracker.all_finished and self.tracker.result is None:
                for _ in self:
                    pass
        finally:
            self.tracker.abandon()
            self.raw.close()

    def overtake(self) -> None:
        """A later turn begins."""
        if self.tracker.all_finished and self._reading.acquire(blocking=False):
            self._reading.release()
            self.close()
        self.tracker.overtake()


class AsyncSessionStream:
    """`SessionStream` for asyncio."""

    def __init__(self, raw: AsyncChunkStream, tracker: Tracker) -> None:
        self.raw, self.tracker = raw, tracker
        self._reading = False

    @property
    def leyline(self) -> TurnResult | None:
        """What the turn came to; None before the stream has ended."""
        return self.tracker.result

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        self._reading = True
        try:
            async for chunk in self.raw:
                passed = self.tracker.feed(chunk)
                if passed is not None:
                    return passed
            self.tracker.end()
        except BaseException:
            self.tracker.abandon()
            raise
        finally:
            self._reading = False
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream. Where the answer is complete its receipt is still read; otherwise the server stops."""
        try:
            if self.tracker.all_finished and self.tracker.result is None:
                async for _ in self:
                    pass
        finally:
            self.tracker.abandon()
            await self.raw.aclose()

    async def overtake(self) -> None:
        """A later turn begins."""
        if self.tracker.all_finished and not self._reading:
            await self.aclose()
        self.tracker.overtake()
