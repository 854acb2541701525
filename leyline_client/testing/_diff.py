"""What changed between the tokens a session holds and the tokens of its next prompt, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyline_client._models import CompiledDirective, Executed, Mode, Reason, Receipt, Segment

from ._toy import Owner, Piece


@dataclass(frozen=True, slots=True)
class Change:
    """A directive without its tokens, and whether the client declared it."""

    start: int
    end: int
    replacement: int
    mode: Mode
    declared: bool = True


@dataclass(frozen=True, slots=True)
class Diff:
    """Changes in source coordinates; source tokens from ``kept_end`` on are not reused."""

    changes: tuple[Change, ...]
    kept_end: int


Judge = Callable[[Sequence[Owner | None]], tuple[Mode, bool]]
"""Owners of a changed run to (mode, declared)."""


def diff_pieces(source: Sequence[Piece], target: Sequence[Piece], judge: Judge) -> Diff:
    """Changes that turn ``source`` into a beginning of ``target``, both with the target's owners.

    Pieces are matched by owner, not by text alone: two tools may well say the same. A change after which no text of the
    source is kept is no change but the start of the appended tail.
    """
    changes: list[Change] = []
    s_index = t_index = position = 0
    for a, b, n in _matching_blocks(source, target):
        if not _holds_text(source[a : a + n], a):
            continue
        removed, added = source[s_index:a], target[t_index:b]
        if removed or added:
            mode, declared = judge([piece.owner for piece in (*removed, *added)])
            changes.append(_trimmed(position, removed, added, mode, declared))
        position += _length(source[s_index : a + n])
        s_index, t_index = a + n, b + n
    # A reply that was cut or altered inside its piece still keeps its beginning.
    if s_index < len(source) and t_index < len(target):
        position += _common(source[s_index].tokens, target[t_index].tokens)
    return Diff(tuple(changes), position)


def _matching_blocks(source: Sequence[Piece], target: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """Blocks (start in source, start in target, length) of equal pieces with equal owners."""
    places = {key: index for index, key in enumerate(_keys(target))}
    blocks: list[tuple[int, int, int]] = []
    last = -1
    for index, key in enumerate(_keys(source)):
        place = places.get(key, -1)
        if place <= last or target[place].tokens != source[index].tokens:
            continue
        last = place
        if blocks and (blocks[-1][0] + blocks[-1][2], blocks[-1][1] + blocks[-1][2]) == (index, place):
            blocks[-1] = (*blocks[-1][:2], blocks[-1][2] + 1)
        else:
            blocks.append((index, place, 1))
    return blocks


def _keys(pieces: Sequence[Piece]) -> list[tuple[Owner | None, int]]:
    """Owner of each piece, and which of its owner's pieces it is."""
    seen: Counter[Owner | None] = Counter()
    keys = []
    for piece in pieces:
        keys.append((piece.owner, seen[piece.owner]))
        seen[piece.owner] += 1
    return keys


def _holds_text(pieces: Sequence[Piece], start: int) -> bool:
    return start == 0 or any(piece.owner is not None and piece.owner[1] is not None for piece in pieces)


def _length(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.tokens) for piece in pieces)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _trimmed(position: int, removed: Sequence[Piece], added: Sequence[Piece], mode: Mode, declared: bool) -> Change:
    old = [token for piece in removed for token in piece.tokens]
    new = [token for piece in added for token in piece.tokens]
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    return Change(position + head, position + len(old) - tail, len(new) - head - tail, mode, declared)


@dataclass(frozen=True, slots=True)
class State:
    """What of a session's cache the accounting needs: its length and where evicted influence begins."""

    tokens: int
    influenced_from: int | None = None


def account(state: State, diff: Diff, target: int, generation: int) -> tuple[Receipt, int | None]:
    """The receipt of moving from ``state`` to a prompt of ``target`` tokens, and where influence begins then."""
    forget = next((change for change in diff.changes if change.mode is Mode.FORGET), None)
    spliced = [c for c in diff.changes if forget is None or c.start < forget.start]
    segments, cached = _segments(spliced, diff.kept_end if forget is None else forget.start, generation)
    if cached == target and cached:
        # The engine always recomputes the last token.
        cached -= 1
    rotated = sum(s.end - s.start for s in segments[1:])
    influenced_from = _influence(state, spliced, forget)
    dropped = 0 if forget is None else state.tokens - forget.start
    receipt = Receipt(
        requested=_requested(diff.changes),
        executed=_executed(spliced, forget),
        prompt_tokens=target,
        cached_tokens=cached,
        rotated_tokens=min(rotated, cached),
        prefilled_tokens=target - cached,
        replacement_tokens=sum(change.replacement for change in spliced),
        influenced_tokens=0 if influenced_from is None else max(0, target - influenced_from),
        dropped_tokens=dropped,
        slots_allocated=target - cached + min(rotated, cached),
        slots_released=dropped or min(rotated, cached),
        generation=generation if spliced else 0,
        segments=tuple(segments) if spliced else (),
        directives=tuple(
            CompiledDirective(
                start=c.start, end=c.end, replacement_tokens=c.replacement, mode=c.mode, declared=c.declared
            )
            for c in diff.changes
        ),
    )
    return receipt, influenced_from


def fresh(target: int, cached: int, asked: Sequence[Mode]) -> Receipt:
    """The receipt of a session's first turn, ``cached`` tokens being reused from other requests."""
    cached = min(cached, max(target - 1, 0))
    modes = set(asked)
    return Receipt(
        requested="none" if not modes else modes.pop() if len(modes) == 1 else "mixed",
        executed=Executed.REPREFILL if asked else Executed.APPEND,
        reason=Reason.NEW_SESSION if asked else None,
        prompt_tokens=target,
        cached_tokens=cached,
        prefilled_tokens=target - cached,
        slots_allocated=target - cached,
    )


def _segments(spliced: Sequence[Change], source_end: int, generation: int) -> tuple[list[Segment], int]:
    segments: list[Segment] = []
    position = delta = cached = 0
    for change in (*spliced, Change(source_end, source_end, 0, Mode.AMORTIZE)):
        if change.start > position or not segments:
            segments.append(
                Segment(
                    start=position + delta,
                    end=change.start + delta,
                    delta=delta,
                    generation=generation if segments else 0,
                )
            )
            cached += change.start - position
        # What a directive puts in is prefilled, so it never counts as cached.
        delta += change.replacement - (change.end - change.start)
        position = change.end
    return segments, cached


def _influence(state: State, spliced: Sequence[Change], forget: Change | None) -> int | None:
    starts = [change.start for change in spliced[:1]]
    if state.influenced_from is not None:
        starts.append(state.influenced_from)
    if forget is not None:
        starts = [start for start in starts if start < forget.start]
    return min(starts, default=None)


def _requested(changes: Sequence[Change]) -> Mode | str:
    modes = {change.mode for change in changes}
    return "none" if not modes else modes.pop() if len(modes) == 1 else "mixed"


def _executed(spliced: Sequence[Change], forget: Change | None) -> Executed:
    if forget is None:
        return Executed.AMORTIZE if spliced else Executed.APPEND
    return Executed.MIXED if spliced else Executed.FORGET
