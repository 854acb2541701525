"""Replies as the openai package's own types where it is installed, otherwise as light objects with the same names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ._errors import ConfigurationError
from ._outcome import TurnResult
from ._tracked import AsyncSessionStream, SessionStream


@lru_cache(maxsize=1)
def has_openai() -> bool:
    """Whether the openai package is installed. It is imported on first use: that takes longer than a turn."""
    return find_spec("openai") is not None


def require_openai(what: str) -> Any:
    """The openai package. Raises `ConfigurationError` where it is missing."""
    if not has_openai():
        raise ConfigurationError(f"{what} needs the openai package: pip install 'leyline-client[openai]'")
    return import_module("openai")


def completion(data: dict[str, Any]) -> Any:
    """A ``ChatCompletion``."""
    return import_module("openai.types.chat").ChatCompletion.construct(**data) if has_openai() else ReplyObject(data)


def chunk(data: dict[str, Any]) -> Any:
    """A ``ChatCompletionChunk``."""
    if has_openai():
        return import_module("openai.types.chat").ChatCompletionChunk.construct(**data)
    return ReplyObject(data)


def stream(chunks: SessionStream) -> Any:
    """A ``Stream[ChatCompletionChunk]``; its ``leyline`` is there when it has ended."""
    return _stream_class()(chunks)


def async_stream(chunks: AsyncSessionStream) -> Any:
    """An ``AsyncStream[ChatCompletionChunk]``."""
    return _async_stream_class()(chunks)


def leyline_of(reply: Any) -> TurnResult:
    """What became of a turn, from its reply or its ended stream: typed, unlike ``reply.leyline``.

    Raises:
        ConfigurationError: the object is no reply of a session, or its stream has not ended.
    """
    result = getattr(reply, "leyline", None)
    if isinstance(result, TurnResult):
        return result
    raise ConfigurationError(f"this {type(reply).__name__} carries no receipt (of a stream: read it to its end)")


class ReplyObject:
    """A JSON object with attributes, also for fields of the API that are absent (None)."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.__dict__.update({name: _wrapped(value) for name, value in data.items()})
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def __repr__(self) -> str:
        return f"ReplyObject({', '.join(self._data)})"

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The plain JSON object, for the history. Of pydantic's options ``exclude_none`` counts."""
        plain = {name: value for name, value in self._data.items() if not isinstance(value, TurnResult)}
        return _without_none(plain) if exclude_none else plain


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return ReplyObject(value)
    return [_wrapped(one) for one in value] if isinstance(value, list) else value


class _StreamMixin:
    """Iterates a session's stream; what else OpenAI's stream offers is on its class."""

    def __init__(self, chunks: SessionStream) -> None:
        self._chunks = chunks
        self.response = chunks.raw.response

    @property
    def leyline(self) -> TurnResult | None:
        return self._chunks.leyline

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return chunk(next(self._chunks))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._chunks.close()


class _AsyncStreamMixin:
    def __init__(self, chunks: AsyncSessionStream) -> None:
        self._chunks = chunks
        self.response = chunks.raw.response

    @property
    def leyline(self) -> TurnResult | None:
        return self._chunks.leyline

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return chunk(await anext(self._chunks))

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._chunks.aclose()

    aclose = close


@lru_cache(maxsize=1)
def _stream_class() -> Any:
    bases = (_StreamMixin, import_module("openai").Stream) if has_openai() else (_StreamMixin,)
    return type("LeylineStream", bases, {"__doc__": _StreamMixin.__doc__})


@lru_cache(maxsize=1)
def _async_stream_class() -> Any:
    bases = (_AsyncStreamMixin, import_module("openai").AsyncStream) if has_openai() else (_AsyncStreamMixin,)
    return type("AsyncLeylineStream", bases, {"__doc__": _StreamMixin.__doc__})
