"""Streamed replies as iterators of raw chunks, sync and async, over one parser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import httpx

from ._http import HTTPX_ERRORS, map_error
from ._sse import ChunkParser


class ChunkStream:
    """The chunks of a streamed reply, as raw dicts. Iterate it once; leaving early needs `close` or ``with``.

    Iterating raises `TransportError` where the connection breaks or the reply is cut off, `ServerError` where the
    engine reports a fault in the middle.
    """

    def __init__(self, response: httpx.Response, where: str) -> None:
        self.response = response
        self._where = where
        self._iterator = self._chunks()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._iterator

    def __next__(self) -> dict[str, Any]:
        return next(self._iterator)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the server stops generating."""
        self.response.close()

    def _chunks(self) -> Iterator[dict[str, Any]]:
        parser = ChunkParser()
        try:
            for data in self.response.iter_bytes():
                yield from parser.feed(data)
                if parser.done:
                    return
            yield from parser.finish()
        except HTTPX_ERRORS as error:
            raise map_error(error, self._where) from error
        finally:
            self.close()


class AsyncChunkStream:
    """`ChunkStream` for asyncio."""

    def __init__(self, response: httpx.Response, where: str) -> None:
        self.response = response
        self._where = where
        self._iterator = self._chunks()

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self._iterator

    async def __anext__(self) -> dict[str, Any]:
        return await anext(self._iterator)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; the server stops generating."""
        await self.response.aclose()

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        parser = ChunkParser()
        try:
            async for data in self.response.aiter_bytes():
                for chunk in parser.feed(data):
                    yield chunk
                if parser.done:
                    return
            for chunk in parser.finish():
                yield chunk
        except HTTPX_ERRORS as error:
            raise map_error(error, self._where) from error
        finally:
            await self.aclose()
