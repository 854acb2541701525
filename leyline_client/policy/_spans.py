"""Arithmetic of half-open character spans ``[start, end)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sorted, touching and overlapping ones joined. An empty span (an insertion) stays where it touches no other."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return tuple(result)


def subtract(span: Span, covered: Sequence[Span]) -> tuple[Span, ...]:
    """What is left of ``span`` outside ``covered`` (sorted and disjoint, as from `merged`)."""
    start, end = span
    result: list[Span] = []
    for low, high in covered:
        if high <= start:
            continue
        if low >= end:
            break
        if low > start:
            result.append((start, low))
        start = max(start, high)
    if start < end:
        result.append((start, end))
    return tuple(result)


def length(spans: Iterable[Span]) -> int:
    """Characters in disjoint ``spans``."""
    return sum(end - start for start, end in spans)
