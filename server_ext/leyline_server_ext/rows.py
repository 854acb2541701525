"""Which slots the rows of a splice come from, and what has been spliced under which signature. No tree, no SGLang."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from leyline_client._models import Reason

from .lineage import Lineage
from .orders import Candidate, Piece

Segment = tuple[int, int, int, int]
"""``(target start, target end, Δ, generation)``: rotated by Δ in its last splice, ``generation`` times in all."""
Cached = Mapping[int, tuple[int, torch.Tensor]]
"""By source number: how many of its tokens are cached, and their slots ``(tokens,)`` int64."""


@dataclass(frozen=True, slots=True)
class Take:
    """Source positions ``[start, start + count)`` of source number ``source``."""

    source: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Stay:
    """Rows ``[start, end)`` of a splice whose slots, source positions from ``origin`` on, can become the target's."""

    start: int
    end: int
    origin: int


@dataclass(slots=True)
class Rows:
    """Rows of one splice: target positions from ``start`` on without a gap, with the slots they come from."""

    start: int
    takes: list[Take] = field(default_factory=list)
    slots: list[torch.Tensor] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    reason: Reason | None = None
    """Why not everything is here that was ordered."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(take.count for take in self.takes)

    @property
    def end(self) -> int:
        """Target position after the last row."""
        return self.start + self.count

    def add(self, candidate: Candidate, origin: int, slots: torch.Tensor) -> None:
        """The next ``len(slots)`` target positions are source positions ``origin`` and following."""
        start, delta = self.end, self.end - origin
        self.takes.append(Take(candidate.source, origin, len(slots)))
        self.slots.append(slots)
        generation = candidate.generation + 1 if delta else candidate.generation
        self.segments.append((start, start + len(slots), delta, generation))

    def cut(self, end: int) -> None:
        """Keep the rows before target position ``end``."""
        while self.takes and self.end > end:
            take, slots, (start, stop, delta, generation) = self.takes.pop(), self.slots.pop(), self.segments.pop()
            keep = end - start
            if keep > 0:
                self.takes.append(Take(take.source, take.start, keep))
                self.slots.append(slots[:keep])
                self.segments.append((start, min(stop, end), delta, generation))

    def staying(self, source: int, first: int, page: int) -> list[Stay]:
        """Rows that lie in pages of ``source`` as they will in the target's: whole pages, moved by whole pages.

        Args:
            source: source number.
            first: the source's position (a page boundary) from which on its pages may be had.
            page: tokens per page.
        """
        found: list[Stay] = []
        for take, (start, stop, delta, _) in zip(self.takes, self.segments, strict=True):
            if take.source != source or delta % page:
                continue
            low, high = -(-max(start, first + delta) // page) * page, stop // page * page
            if low < high:
                found.append(Stay(low - self.start, high - self.start, low - delta))
        return found

    def delta(self) -> torch.Tensor | int:
        """Per-row Δ ``(rows,)`` int64 beside the slots; one integer where all rows agree."""
        deltas = {delta for _, _, delta, _ in self.segments}
        if len(deltas) == 1:
            return deltas.pop()
        # Filled on the device: a tensor made here and copied over would make the host wait.
        return torch.cat([torch.full_like(s, seg[2]) for s, seg in zip(self.slots, self.segments, strict=True)])


def collect(pieces: Sequence[Piece], found: Cached, matched: int, length: int, page: int) -> Rows:
    """Rows for the target positions from ``matched`` on, as far as they can be had without a gap, in whole pages.

    A position comes from the oldest candidate that is cached there (rotate once).

    Args:
        pieces: ascending, adjacent or with gaps; what lies in a gap must be cached under the target's own key.
        found: the sources' cached tokens.
        matched: target positions already cached.
        length: target positions that can be used at all.
        page: tokens per page.
    """
    rows = Rows(matched)
    for piece in pieces:
        stop = min(piece.end, length)
        if stop <= rows.end:
            continue
        if piece.start > rows.end:
            first = piece is pieces[0]
            rows.reason = Reason.SOURCE_NOT_CACHED if first else Reason.REPLACEMENT_NOT_CACHED
            break
        _fill(rows, piece, stop, found)
        if rows.end < stop:
            rows.reason = _missing(piece, rows)
            break
    rows.cut(rows.end // page * page)
    return rows


def _fill(rows: Rows, piece: Piece, stop: int, found: Cached) -> None:
    while rows.end < stop:
        position = rows.end
        for candidate in piece.candidates:
            cached, slots = found[candidate.source]
            origin = candidate.start + position - piece.start
            count = min(stop - position, cached - origin)
            if count > 0:
                rows.add(candidate, origin, slots[origin : origin + count])
                break
        else:
            return


def _missing(piece: Piece, rows: Rows) -> Reason:
    if piece.prefilled:
        return Reason.REPLACEMENT_NOT_CACHED
    return Reason.SOURCE_PARTIALLY_CACHED if rows.takes else Reason.SOURCE_NOT_CACHED


def gaps(ranges: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """What of ``count`` rows none of ``ranges`` (ascending, disjoint) covers."""
    edges = [0, *(edge for span in ranges for edge in span), count]
    return [(low, high) for low, high in zip(edges[0::2], edges[1::2], strict=True) if low < high]


def picked(values: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """``values`` (one per row) of the rows in ``ranges``, end to end."""
    return torch.cat([values[low:high] for low, high in ranges]) if ranges else values[:0]


class Spliced:
    """Remembers the segments spliced under a signature: who finds them cached later is told of their generation.

    An internal prefill grafts for the request after it, and equal edits of equal text share their KV. Bounded; for
    what was forgotten (or made by a server process before this one) the order's own figures are the estimate.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._by_signature: OrderedDict[int, tuple[Segment, ...]] = OrderedDict()
        self._limit = limit

    def note(self, lineage: Lineage, segments: Sequence[Segment]) -> None:
        """``segments`` were just spliced under ``lineage``."""
        for segment in segments:
            signature = lineage.signature_at(segment[0])
            before = self._by_signature.pop(signature, ())
            outside = [part for old in before for part in _outside(old, segment)]
            self._by_signature[signature] = tuple(sorted((*outside, segment)))
            if len(self._by_signature) > self._limit:
                self._by_signature.popitem(last=False)

    def report(self, lineage: Lineage, pieces: Sequence[Piece], cached: int) -> list[Segment]:
        """Segments of what the first ``cached`` positions hold of ``pieces``, ascending."""
        result: list[Segment] = []
        for piece in pieces:
            position, stop = piece.start, min(piece.end, cached)
            for start, end, delta, generation in self._by_signature.get(lineage.signature_at(piece.start), ()):
                start, end = max(start, position), min(end, stop)
                if start >= end:
                    continue
                if position < start:
                    result.append(_estimate(piece, position, start))
                result.append((start, end, delta, generation))
                position = end
            if position < stop:
                result.append(_estimate(piece, position, stop))
        return result


def _estimate(piece: Piece, start: int, end: int) -> Segment:
    """No less than the generation really is, as long as the candidates' own figures are right."""
    delta = piece.start - piece.candidates[-1].start
    return start, end, delta, max(c.generation for c in piece.candidates) + bool(delta)


def _outside(old: Segment, new: Segment) -> list[Segment]:
    """The parts of ``old`` that ``new`` does not cover."""
    start, end, delta, generation = old
    parts = [(start, min(end, new[0]), delta, generation), (max(start, new[1]), end, delta, generation)]
    return [part for part in parts if part[0] < part[1]]
