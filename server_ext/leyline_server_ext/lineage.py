"""Lineage: the operations a KV state carries, written into the radix key.

AKV (seed §3) keys a tree edge by ``(tokens, ops)``. SGLang's stock tree keys it by 64-bit integers, of which a
token id needs under 24 bits. From the first position that a splice changed, the key element becomes
``token | tag << 24`` where the tag is drawn from the signature of the operations up to there::

    position      0 ........ s | s ...... b | b ...........
    operations        none     |    op1     |  op1, op2
    key element      token     | token|t1<<24 | token|t2<<24

So equal histories share, different ones fork, and a clean key (no operations) never reaches spliced KV.

A signature is a 64-bit keyed hash over (signature before, position, evicted key elements, replacement); the tag at a
position mixes signature and position, so that two signatures would have to agree on every position to be confused.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TOKEN_BITS = 24
TAG_BITS = 63 - TOKEN_BITS
CLEAN = 0
"""The signature of KV that no splice has touched."""

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lineage:
    """Operations of a KV state as ``(position, signature)``, ascending: a signature holds from its position on.

    Attributes:
        entries: the operations; empty for clean KV.
        spliced_until: positions before it hold spliced KV from the first entry on; from it on the KV was prefilled.
    """

    entries: tuple[tuple[int, int], ...] = ()
    spliced_until: int = 0

    def __bool__(self) -> bool:
        return bool(self.entries)

    def signature_at(self, position: int) -> int:
        """The signature in force at ``position``."""
        current = CLEAN
        for start, signature in self.entries:
            if start > position:
                break
            current = signature
        return current

    def before(self, position: int) -> Lineage:
        """The lineage of the first ``position`` tokens, continued by plain prefill."""
        if position < self.spliced_until:
            return self.prefilled_from(position)
        kept = tuple(entry for entry in self.entries if entry[0] < position)
        return Lineage(kept, self.spliced_until).ended() if kept else CLEAN_LINEAGE

    def prefilled_from(self, position: int) -> Lineage:
        """The lineage when only ``position`` tokens were found cached and the rest is prefilled honestly.

        From ``spliced_until`` on that is what the lineage says anyway. Before it, the KV is not what the splice
        would have put there, so it gets a signature of its own (or none, where nothing spliced precedes it).
        """
        if position >= self.spliced_until:
            return self
        kept = tuple(entry for entry in self.entries if entry[0] < position)
        return Lineage(kept, position).ended() if kept else CLEAN_LINEAGE

    def ended(self) -> Lineage:
        """With the mark where spliced KV ends.

        Without it, text prefilled after a short splice and the same text spliced from a longer source would have one
        key and two values.
        """
        last, signature = self.entries[-1]
        if last >= self.spliced_until:
            return self
        return Lineage(
            (*self.entries, (self.spliced_until, prefill_mark(signature, self.spliced_until))), self.spliced_until
        )

    @property
    def first(self) -> int | None:
        """First position that may carry evicted influence, or None."""
        return self.entries[0][0] if self.entries else None


def prefill_mark(before: int, position: int) -> int:
    """The signature of plain prefill from ``position`` on, on top of KV under the signature ``before``."""
    return sign(before, position, b"prefilled")


CLEAN_LINEAGE = Lineage()
"""Of KV that no splice has touched."""


def sign(before: int, position: int, *parts: bytes) -> int:
    """A 64-bit signature chaining ``before``; ``parts`` are length-prefixed, so they cannot run into each other."""
    digest = hashlib.blake2b(digest_size=8, person=b"leyline-lineage")
    digest.update(before.to_bytes(8, "little") + position.to_bytes(8, "little"))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    # Zero means clean: the one value an operation must not take.
    return int.from_bytes(digest.digest(), "little") or 1


def tags(signature: int, start: int, stop: int) -> Ids:
    """Shifted tags for positions ``[start, stop)``: ``(stop - start,)`` int64 with the low `TOKEN_BITS` bits zero."""
    return _mixed(np.uint64(signature), np.arange(start, stop, dtype=np.uint64))


def _mixed(signatures: npt.NDArray[np.uint64] | np.uint64, positions: npt.NDArray[np.uint64]) -> Ids:
    """Tags of ``positions`` (overwritten) under ``signatures``, one for all or one per position."""
    x = positions
    # splitmix64's finaliser: every bit of (signature, position) reaches every bit of the tag.
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += signatures
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    # A zero tag would look clean; setting the lowest tag bit costs one bit of 39.
    x |= np.uint64(1)
    x <<= np.uint64(TOKEN_BITS)
    x &= np.uint64(0x7FFF_FFFF_FFFF_FFFF)
    return x.view(np.int64)


@dataclass(slots=True)
class KeyTranslator:
    """Turns token ids into tree keys for one lineage, keeping the tags it has computed.

    One instance serves all requests of a lineage: matching happens several times per request, and each call costs
    one vectorised OR over the tagged part.
    """

    lineage: Lineage
    _tags: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    def tagged(self, token_ids: array[int]) -> array[int]:
        """A copy of ``token_ids`` (``array('q')``) as tree key."""
        first = self.lineage.first
        if first is None or first >= len(token_ids):
            return token_ids
        key = array("q", token_ids)
        view = np.frombuffer(key, dtype=np.int64)
        view[first:] |= self._upto(len(key))[: len(key) - first]
        return key

    def _upto(self, length: int) -> Ids:
        first = self.lineage.first or 0
        if len(self._tags) < length - first:
            # Grow ahead: a conversation appends, and recomputing every turn would be quadratic.
            self._tags = lineage_tags(self.lineage, length + max(1024, length // 4))
        return self._tags


def lineage_tags(lineage: Lineage, length: int) -> Ids:
    """Tags of positions ``[first, length)`` under ``lineage``; one pass, however many operations there are."""
    first = lineage.first
    if first is None or first >= length:
        return np.empty(0, np.int64)
    starts = np.minimum([start for start, _ in lineage.entries] + [length], length)
    signatures = np.array([signature for _, signature in lineage.entries], dtype=np.uint64)
    return _mixed(np.repeat(signatures, np.diff(starts)), np.arange(first, length, dtype=np.uint64))


def key_elements(token_ids: Ids, lineage: Lineage) -> Ids:
    """Tree key of ``token_ids`` (int64) under ``lineage``, as an array."""
    first = lineage.first
    if first is None or first >= len(token_ids):
        return token_ids
    key = token_ids.copy()
    key[first:] |= lineage_tags(lineage, len(key))
    return key


def canonical(entries: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Entries without those that change nothing (an equal signature again, a position overwritten by the next)."""
    result: list[tuple[int, int]] = []
    for position, signature in entries:
        if result and result[-1][0] == position:
            result.pop()
        if (result[-1][1] if result else CLEAN) != signature:
            result.append((position, signature))
    return tuple(result)


def as_empty_ids() -> Ids:
    """No tokens."""
    return np.empty(0, np.int64)
