"""What the HTTP process tells the scheduler's cache, and how it is sealed.

Two strings travel with a request through SGLang's own fields: the lineage in ``extra_key`` (it decides the radix
key), the order in ``custom_params`` (it says where spliced KV comes from and what to drop). Both carry a MAC under a
key that the server's own processes share, over the payload and the request's cache namespace: a client that could
write them itself could plant KV under somebody else's key.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .lineage import Ids, Lineage

LINEAGE_PREFIX = "leyline:"
ORDER_KEY = "leyline"
"""Name of the order in ``custom_params``, and of the report in the reply's ``meta_info``."""
_MAC_CHARS = 32
_HEADER = struct.Struct("<I")


class Forged(ValueError):
    """A lineage or order that this server did not make for this namespace."""


@dataclass(frozen=True, slots=True)
class Source:
    """A KV state that may still be cached: its tokens (as far as needed) and its lineage."""

    ids: Ids
    lineage: Lineage


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place a run of target positions can come from."""

    source: int
    """Index into `Order.sources`."""
    start: int
    """First source position of the run; Δ is the target position minus this."""
    generation: int
    """Rotations this KV has behind it already."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Target positions ``[start, end)``; candidates oldest first: the oldest that is cached supplies a position."""

    start: int
    end: int
    candidates: tuple[Candidate, ...]
    prefilled: bool = False
    """A replacement, made by an internal prefill (only named where it shares a page with something spliced)."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove the nodes of a source from ``position`` on, as far as nobody else holds them."""

    source: int
    position: int


@dataclass(frozen=True, slots=True)
class Order:
    """Everything the cache is asked to do for one request.

    ``forget`` is carried out before matching, ``release`` after a complete graft. With ``exclusive`` the release may be
    folded into the graft: slots that nobody else holds are rotated in place instead of copied.
    """

    sources: tuple[Source, ...] = ()
    pieces: tuple[Piece, ...] = ()
    forget: tuple[Drop, ...] = ()
    release: tuple[Drop, ...] = ()
    exclusive: bool = False


EMPTY_ORDER = Order()
"""Nothing to do."""


class Sealer:
    """Seals and opens lineages and orders under the server's key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # Opening is on the path of every match of a tagged request, several times per request.
        self.open_lineage = lru_cache(maxsize=4096)(self._open_lineage)

    def seal_lineage(self, lineage: Lineage, namespace: str | None, extra_key: str | None) -> str | None:
        """The ``extra_key`` for a request: the client's own where the lineage is clean."""
        if not lineage:
            return extra_key
        payload = _text({"l": [list(entry) for entry in lineage.entries], "u": lineage.spliced_until})
        return f"{LINEAGE_PREFIX}{payload}.{self._mac('lineage', payload, namespace)}|{extra_key or ''}"

    def _open_lineage(self, extra_key: str, namespace: str | None) -> tuple[Lineage, str | None]:
        """Lineage and the client's own extra key (LoRA ids are appended to it by the engine).

        Raises:
            Forged: not made by this server for this namespace.
        """
        sealed, _, rest = extra_key.removeprefix(LINEAGE_PREFIX).partition("|")
        data = json.loads(self._verified("lineage", sealed, namespace))
        return Lineage(_entries(data["l"]), int(data["u"])), rest or None

    def seal_order(self, order: Order, namespace: str | None) -> str:
        """The order as one string (SGLang's ``custom_params`` values are JSON scalars)."""
        body = {
            "s": [
                [len(s.ids), [list(entry) for entry in s.lineage.entries], s.lineage.spliced_until]
                for s in order.sources
            ],
            "p": [
                [p.start, p.end, [[c.source, c.start, c.generation] for c in p.candidates], p.prefilled]
                for p in order.pieces
            ],
            "f": [[d.source, d.position] for d in order.forget],
            "r": [[d.source, d.position] for d in order.release],
            "x": order.exclusive,
        }
        # Token ids go beside the JSON as they lie in memory: as text they would cost more than the graft's own work.
        payload = _text(body, *(s.ids.astype("<i4").tobytes() for s in order.sources))
        return f"{payload}.{self._mac('order', payload, namespace)}"

    def open_order(self, sealed: str, namespace: str | None) -> Order:
        """The order; raises `Forged` when it was not made by this server for this namespace."""
        raw = self._verified("order", sealed, namespace)
        (size,) = _HEADER.unpack_from(raw)
        body = json.loads(raw[_HEADER.size : _HEADER.size + size])
        ids = np.frombuffer(raw, dtype="<i4", offset=_HEADER.size + size).astype(np.int64)
        sources = []
        for count, entries, until in body["s"]:
            sources.append(Source(ids[:count], Lineage(_entries(entries), until)))
            ids = ids[count:]
        return Order(
            sources=tuple(sources),
            pieces=tuple(
                Piece(start, end, tuple(Candidate(*c) for c in found), bool(prefilled))
                for start, end, found, prefilled in body["p"]
            ),
            forget=tuple(Drop(*d) for d in body["f"]),
            release=tuple(Drop(*d) for d in body["r"]),
            exclusive=bool(body["x"]),
        )

    def _mac(self, purpose: str, payload: str, namespace: str | None) -> str:
        # The namespace is the client's own text: its length says where it ends, and any text can be encoded.
        name = (namespace or "").encode("utf-8", "surrogatepass")
        message = b"%s\0%d\0%s\0%s" % (purpose.encode(), len(name), name, payload.encode("utf-8", "surrogatepass"))
        return hmac.digest(self._key, message, "sha256").hex()[:_MAC_CHARS]

    def _verified(self, purpose: str, sealed: str, namespace: str | None) -> bytes:
        payload, _, mac = sealed.rpartition(".")
        wanted = self._mac(purpose, payload, namespace)
        if not payload or not hmac.compare_digest(mac.encode("utf-8", "surrogatepass"), wanted.encode()):
            raise Forged(f"the {purpose} was not made by this server for this cache namespace")
        try:
            raw = base64.urlsafe_b64decode(payload)
        except (binascii.Error, ValueError) as error:
            raise Forged(f"the {purpose} is damaged") from error
        return raw[_HEADER.size :] if purpose == "lineage" else raw


def _entries(data: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(position), int(signature)) for position, signature in data)


def _text(body: object, *blobs: bytes) -> str:
    """A JSON header and raw bytes after it, as text that survives every hop."""
    header = json.dumps(body, separators=(",", ":")).encode()
    # The ids start on a multiple of their size, so that they can be read where they lie.
    header += b" " * (-len(header) % 4)
    return base64.urlsafe_b64encode(b"".join((_HEADER.pack(len(header)), header, *blobs))).decode()
