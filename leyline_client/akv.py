"""AKV's vocabulary (seed: AKV article, section 2) over directives.

AKV edits a cache with two operators: ``drop(s, e)`` hides a span, ``repos`` moves what follows so that no position is
left empty. A Leyline deletion is both at once, so `drop` makes the directive and `repos` says what it moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ._models import Directive, Mode, Segment, check_directives

__all__ = ["drop", "repos"]


def drop(start: int, end: int, *, mode: Mode = Mode.AMORTIZE) -> Directive:
    """Hide tokens ``[start, end)`` and close the gap."""
    return Directive(start=start, end=end, mode=mode)


def repos(directives: Sequence[Directive], source_length: int) -> tuple[Segment, ...]:
    """What a batch moves: the runs of kept tokens in target coordinates, each with its Δ in positions.

    Runs that stay where they are (before the first directive) are left out. Pure arithmetic: no server is asked.

    Raises:
        ValueError: the batch is out of order, overlaps or lies beyond the source.
    """
    batch = list(directives)
    check_directives(batch, source_length)
    segments: list[Segment] = []
    shift = 0
    for index, directive in enumerate(batch):
        shift += directive.delta
        end = batch[index + 1].start if index + 1 < len(batch) else source_length
        if end > directive.end:
            segments.append(Segment(start=directive.end + shift, end=end + shift, delta=shift, generation=1))
    return tuple(segments)
