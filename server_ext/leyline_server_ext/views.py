"""What the planner reads and writes: views of a session, changes between them, and the plan for a prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leyline_client._models import CompiledDirective, Mode

from .diff import Hunk
from .lineage import CLEAN_LINEAGE, Ids, Lineage
from .orders import EMPTY_ORDER, Order

MAX_ANCESTORS = 8
"""Earlier views of a session kept for `undo` and for rotating from pristine KV."""


@dataclass(frozen=True, slots=True)
class Run:
    """A kept run: the tokens ``[start, end)`` of the newer view are those from ``origin`` on of the older one."""

    start: int
    end: int
    origin: int
    alike: bool = True
    """Their KV is the same too, up to its rotation: it was spliced, not prefilled again."""


@dataclass(frozen=True, slots=True)
class View:
    """A KV state of a session: tokens, lineage, and how often each spliced run has been rotated."""

    ids: Ids
    lineage: Lineage = CLEAN_LINEAGE
    generations: tuple[tuple[int, int, int], ...] = ()
    """``(start, end, generation)`` of runs that are not pristine."""

    def generation(self, start: int, end: int) -> int:
        """The highest generation in ``[start, end)``."""
        return max((g for a, b, g in self.generations if a < end and start < b), default=0)


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An earlier view and where its tokens are in the current one."""

    view: View
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A hunk with the mode it gets, declared by an edit or directive or not."""

    hunk: Hunk
    mode: Mode
    declared: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do for one prompt.

    Attributes:
        target: prompt tokens, int64.
        lineage: lineage of the prompt if everything goes as planned.
        order: what the cache is asked to do for the prompt itself.
        warmups: prefixes ``(length, lineage)`` to prefill first, ascending: each ends with a replacement.
        warmed: tokens those prefills compute if everything else is cached.
        runs: kept runs from the current view into the target (identity before the first change not included).
        directives: what was compiled, in source coordinates.
        forget_from: target position of the first forgotten token, or None.
    """

    target: Ids
    lineage: Lineage
    order: Order = EMPTY_ORDER
    warmups: tuple[tuple[int, Lineage], ...] = ()
    warmed: int = 0
    runs: tuple[Run, ...] = ()
    directives: tuple[CompiledDirective, ...] = ()
    forget_from: int | None = None

    @property
    def rotates(self) -> bool:
        """Whether any KV is to be spliced."""
        return bool(self.order.pieces)


def compose(ancestors: Sequence[Ancestor], changes: Sequence[Change], runs: Sequence[Run]) -> tuple[Ancestor, ...]:
    """Ancestors seen from the next view: positions before the first change stay, kept runs move, the rest is lost."""
    if not changes:
        return tuple(ancestors)
    stay = changes[0].hunk.source_start
    moves = [Run(0, stay, 0), *runs] if stay else list(runs)
    result = []
    for ancestor in ancestors:
        moved = [
            Run(
                move.start + max(run.start, move.origin) - move.origin,
                move.start + min(run.end, move.origin + move.end - move.start) - move.origin,
                run.origin + max(run.start, move.origin) - run.start,
                move.alike and run.alike,
            )
            for move in moves
            for run in ancestor.runs
            if max(run.start, move.origin) < min(run.end, move.origin + move.end - move.start)
        ]
        if moved:
            result.append(Ancestor(ancestor.view, tuple(moved)))
    return tuple(result)


def within(ancestors: Sequence[Ancestor], end: int) -> tuple[Ancestor, ...]:
    """What ancestors say of the first ``end`` positions of the view: other tokens follow there now."""
    result = []
    for ancestor in ancestors:
        runs = tuple(replace(run, end=min(run.end, end)) for run in ancestor.runs if run.start < end)
        if runs:
            result.append(replace(ancestor, runs=runs))
    return tuple(result)


def unlike_from(runs: Sequence[Run], position: int) -> tuple[Run, ...]:
    """``runs`` when the view's KV from ``position`` on was prefilled again."""
    result: list[Run] = []
    for run in runs:
        if run.start < position:
            result.append(replace(run, end=min(run.end, position)))
        if run.end > position:
            start = max(run.start, position)
            result.append(Run(start, run.end, run.origin + start - run.start, alike=False))
    return tuple(result)


def as_ids(tokens: Sequence[int] | Ids) -> Ids:
    """Token ids as the planner wants them: a contiguous int64 array."""
    return np.ascontiguousarray(tokens, dtype=np.int64)
