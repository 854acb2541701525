"""A turn's context as blocks in order: kept, rotated and fresh tokens, and the evicted ones where they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KINDS = ("kept", "rotated", "fresh", "evicted")

Block = tuple[str, int]
"""Kind and number of tokens. ``evicted`` blocks are no part of the prompt: they show what this turn took out."""


def blocks(receipt: Mapping[str, Any]) -> list[Block]:
    """The strip of one turn, from its receipt alone.

    The tokens of all kinds but ``evicted`` add up to ``prompt_tokens``; kept plus rotated to ``cached_tokens``.
    """
    prompt, cached = int(receipt["prompt_tokens"]), int(receipt["cached_tokens"])
    kinds = ["fresh"] * prompt
    moved = sorted((int(s["start"]), int(s["end"]), int(s["delta"])) for s in receipt["segments"])
    for start, end, delta in moved:
        kinds[start:end] = ["rotated" if delta else "kept"] * (min(end, prompt) - start)
    # What was reused and lies in no segment is the untouched beginning, and replacements that were cached already.
    left = cached - sum(kind != "fresh" for kind in kinds)
    for position, kind in enumerate(kinds):
        if left <= 0:
            break
        if kind == "fresh":
            kinds[position] = "kept"
            left -= 1
    return _runs(kinds, dict(_evictions(receipt)))


def _evictions(receipt: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """(target position, tokens taken out there) of each directive."""
    shift = 0
    for directive in receipt["directives"]:
        start, end = int(directive["start"]), int(directive["end"])
        if end > start:
            yield start + shift, end - start
        shift += int(directive["replacement_tokens"]) - (end - start)


def _runs(kinds: list[str], evicted: Mapping[int, int]) -> list[Block]:
    found: list[Block] = []
    begin = 0
    for position in range(len(kinds) + 1):
        ends = position == len(kinds) or kinds[position] != kinds[begin] or position in evicted
        if ends and position > begin:
            found.append((kinds[begin], position - begin))
            begin = position
        if position in evicted:
            found.append(("evicted", evicted[position]))
    # Directives behind the end (a reply that was taken back) still say what they took.
    found += [("evicted", count) for position, count in evicted.items() if position > len(kinds)]
    return found
