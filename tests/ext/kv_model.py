"""What KV means, as plain lists: the independent side of the state machine.

A token's KV is a function of the token, its position and the KV before it. Its *content* is a number that stands for
the value of that function: an honest prefill computes it from the contents really there, a splice moves it. Two KV
rows with equal content are the same KV, whoever computed it and wherever it was moved to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

BITS = 48


def chain(contents: Sequence[int]) -> bytes:
    """Everything that a token after ``contents`` attends to."""
    state = b"start"
    for content in contents:
        state = _next(state, content)
    return state


def _next(state: bytes, content: int) -> bytes:
    return hashlib.blake2b(state + content.to_bytes(8, "little"), digest_size=12).digest()


def prefill(contents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """``contents`` continued: an honest prefill of ``tokens[len(contents):]`` on top of them."""
    result, state = list(contents), chain(contents)
    for position in range(len(result), len(tokens)):
        raw = state + int(tokens[position]).to_bytes(4, "little") + position.to_bytes(4, "little")
        content = int.from_bytes(hashlib.blake2b(raw, digest_size=BITS // 8).digest(), "little")
        result.append(content)
        state = _next(state, content)
    return result


def edited(
    before: Sequence[int], view: Sequence[int], target: Sequence[int], changes: Sequence[Any], kept: int, page: int
) -> list[int]:
    """Contents of ``target`` if every source is cached.

    Args:
        before: contents of the view's fed tokens.
        view: the view's tokens; the last one was never fed.
        target: the next prompt.
        changes: hunks with their modes.
        kept: view position after which nothing is kept.
        page: tokens per page; a replacement's page is computed again from its start.
    """
    fed = max(len(view) - 1, 0)
    if not changes:
        return prefill(before[: min(kept, fed, len(target) - 1) // page * page], target)
    limit = min(kept, fed // page * page)
    out = list(before[: min(changes[0].hunk.source_start, fed)])
    prefix, floor = list(out), 0
    moved: list[tuple[int, int]] = []
    for index, change in enumerate(changes):
        if change.mode.value == "forget":
            break
        hunk = change.hunk
        shift = hunk.target_end - hunk.source_end
        stop = min(changes[index + 1].hunk.source_start if index + 1 < len(changes) else limit, limit)
        if index + 1 < len(changes) and _drops(changes[index + 1]):
            stop = stop // page * page  # what is forgotten takes its page along first
        stop = min(stop, len(target) - 1 - shift)
        if stop <= hunk.source_end:
            continue
        head = len(out) // page * page
        out += prefill(out[:head], target[: hunk.target_end])[len(out) :]
        moved.append((len(out), stop + shift))
        out += before[hunk.source_end : stop]
    # Whole pages only: what sticks out of the last one is prefilled, and what then follows no moved token as well.
    while moved and moved[-1][0] >= (floor := moved[-1][1] // page * page):
        moved.pop()
        moved = [(start, min(end, floor)) for start, end in moved]
    return prefill(out[:floor] if moved else prefix[: min(len(prefix), len(target) - 1) // page * page], target)


def _drops(change: Any) -> bool:
    return change.mode.value == "forget" and change.declared and change.hunk.source_start < change.hunk.source_end
