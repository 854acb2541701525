"""Refuse lineages and orders that this server did not make before they reach the scheduler, on every SGLang route."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import compat, shared
from .orders import LINEAGE_PREFIX, ORDER_KEY, Forged, Sealer


def install_guard() -> None:
    """Check every request at the one place all routes pass through, by SGLang's own hook registry."""
    sealer = Sealer(shared.key())

    def checked(original: Any, manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        check(sealer, request)
        return original(manager, request, *args, **kwargs)

    compat.register_hook(compat.GENERATE, checked)


def check(sealer: Sealer, request: Any) -> None:
    """Raise ValueError (the engine answers 400) for a forged or replayed lineage or order.

    Costs two attribute look-ups for a request that carries neither.
    """
    salt = getattr(request, "cache_salt", None)
    for index, extra_key in _each(getattr(request, "extra_key", None)):
        if isinstance(extra_key, str) and extra_key.startswith(LINEAGE_PREFIX):
            try:
                sealer.open_lineage(extra_key, _at(salt, index))
            except Forged as error:
                raise ValueError(f"extra_key: {error}") from None
    for index, params in _each(getattr(request, "sampling_params", None)):
        custom = params.get("custom_params") if isinstance(params, dict) else None
        if isinstance(custom, dict) and ORDER_KEY in custom:
            try:
                sealer.open_order(str(custom[ORDER_KEY]), _at(salt, index))
            except Forged as error:
                raise ValueError(f"sampling_params.custom_params.{ORDER_KEY}: {error}") from None


def _each(value: Any) -> Iterable[tuple[int, Any]]:
    if value is None:
        return ()
    return enumerate(value) if isinstance(value, list) else ((0, value),)


def _at(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) and index < len(value) else value
