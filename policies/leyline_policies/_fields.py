"""Parameter types that several policies share."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib import import_module
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""Tool names or shell-style patterns of them; one string stands for itself."""
Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
NaturalInt = Annotated[int, Field(strict=True, ge=0)]
Stub = Annotated[str, Field(max_length=1_000)]
"""Text put in the place of what goes. Empty: a pure deletion, which costs the server no forward."""


def _load(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    module, colon, name = value.partition(":")
    if not colon:
        raise ValueError("name a function as 'module:function'")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {value}: {error}") from None


FROM_NAME = BeforeValidator(_load)
"""Lets a function be given as ``module:function``."""


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a tool name is one of ``patterns`` (case counts; ``*`` and ``?`` as in a shell)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
