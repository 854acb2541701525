"""The radix cache: SGLang's own, with lineage-tagged keys and the graft at admission.

The whole of the subclass is key translation plus one detour at the match a prefill starts from. A request without
lineage and order takes the stock path after two attribute checks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from . import compat
from .lineage import KeyTranslator, Lineage
from .orders import LINEAGE_PREFIX, ORDER_KEY, Forged, Sealer

if TYPE_CHECKING:
    from .graft import Grafter

logger = logging.getLogger(__name__)

_TRANSLATORS = 256
"""Lineages whose tags are kept (8 bytes per tagged token each)."""


class Translators:
    """Opens the lineage in a key's ``extra_key`` and turns the key into what the tree stores."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._known: OrderedDict[tuple[str, str | None], tuple[KeyTranslator, str | None]] = OrderedDict()

    def open(self, extra_key: str, cache_salt: str | None) -> tuple[KeyTranslator, str | None] | None:
        """Translator and the client's own extra key; None for a string this server did not make."""
        name = (extra_key, cache_salt)
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        try:
            lineage, rest = self._sealer.open_lineage(extra_key, cache_salt)
        except Forged:
            # It stays what it is for SGLang: an opaque namespace of its own, that reaches nobody else's KV. It is not
            # remembered: strings that anybody can make up must not push out translators in use.
            logger.warning("leyline: ignored a lineage that this server did not make")
            return None
        opened = (KeyTranslator(lineage), rest)
        self._known[name] = opened
        if len(self._known) > _TRANSLATORS:
            self._known.popitem(last=False)
        return opened

    def key(self, key: Any) -> Any:
        """``key`` (a RadixKey) as the tree stores it; the same object where it carries no lineage."""
        extra_key = key.extra_key
        if extra_key is None or not extra_key.startswith(LINEAGE_PREFIX):
            return key
        opened = self.open(extra_key, key.cache_salt)
        if opened is None:
            return key
        translator, rest = opened
        return compat.tree().RadixKey(
            translator.tagged(key.token_ids), rest, is_bigram=key.is_bigram, limit=key.limit, cache_salt=key.cache_salt
        )

    def lineage(self, extra_key: str | None, cache_salt: str | None) -> tuple[Lineage, str | None]:
        """Lineage of a request and the client's own extra key."""
        if extra_key is None or not extra_key.startswith(LINEAGE_PREFIX):
            return Lineage(), extra_key
        opened = self.open(extra_key, cache_salt)
        return (Lineage(), extra_key) if opened is None else (opened[0].lineage, opened[1])


@cache
def cache_class() -> type:
    """The subclass of SGLang's ``UnifiedRadixCache`` (made on demand: SGLang is imported then)."""
    base: Any = compat.tree().UnifiedRadixCache

    class LeylineRadixCache(base):
        """``UnifiedRadixCache`` whose keys are ``(tokens, operations)`` (AKV, seed §3)."""

        leyline_translators: Translators | None = None
        leyline_grafter: Grafter | None = None
        leyline_probe: Callable[[Any, Any, int], None] | None = None
        """Diagnostics: told of every finished request while its KV is still its own (see `probe`)."""

        def match_prefix(self, params: Any) -> Any:
            if (
                self.leyline_grafter is not None
                and compat.is_admission_match(params)
                and compat.order_of(params.req, ORDER_KEY) is not None
            ):
                return self.leyline_grafter.admit(params)
            return self.leyline_match(params)

        def leyline_match(self, params: Any) -> Any:
            """Match without grafting."""
            key = self._leyline_key(params.key)
            return super().match_prefix(params if key is params.key else dataclasses.replace(params, key=key))

        def insert(self, params: Any) -> Any:
            key = self._leyline_key(params.key)
            return super().insert(params if key is params.key else dataclasses.replace(params, key=key))

        def touch_prefix(self, key: Any) -> None:
            super().touch_prefix(self._leyline_key(key))

        def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
            if self.leyline_probe is not None and req.finished():
                self.leyline_probe(self, req, up_to)
            if getattr(req, "leyline_progress", None) is not None:
                up_to = compat.publishable(req, up_to)
            super().checkpoint(req, up_to=up_to, **kwargs)

        def _leyline_key(self, key: Any) -> Any:
            return key if self.leyline_translators is None else self.leyline_translators.key(key)

    return LeylineRadixCache
