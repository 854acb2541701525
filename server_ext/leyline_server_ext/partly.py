"""Splices that were carried out in part: under which keys what was prefilled on top of them lies.

Whoever ordered a splice learns from its report how far it came. Where the client went away there is no report, and the
session knows only the key of the whole. The scheduler remembers the rest, so that a forget finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from .lineage import Lineage
from .orders import Drop, Source
from .strays import shared


class Partly:
    """For each ordered lineage, the positions that prefill took over at. Bounded: the latest ``limit`` lineages."""

    def __init__(self, limit: int = 1024) -> None:
        self._by_end: OrderedDict[tuple[int, int], tuple[Lineage, set[int]]] = OrderedDict()
        self._limit = limit

    def note(self, ordered: Lineage, position: int) -> None:
        """Of what was ``ordered`` only ``position`` tokens were there."""
        # Signatures are chained: the last one stands for all before it, in any lineage that continues this one.
        end = ordered.entries[-1]
        self._by_end.setdefault(end, (ordered, set()))[1].add(position)
        self._by_end.move_to_end(end)
        if len(self._by_end) > self._limit:
            self._by_end.popitem(last=False)

    def along(
        self, sources: Sequence[Source], drops: Sequence[Drop], spared: Source
    ) -> tuple[list[Source], list[Drop]]:
        """``sources`` and ``drops``, and the partial versions of what is dropped.

        A version goes from where it leaves every source and ``spared``: of what it has in common with these, the
        drops say what is to become.
        """
        more, dropped = list(sources), list(drops)
        for number in sorted({drop.source for drop in drops}):
            for version in self._versions(sources[number]):
                position = max(shared(version, other) for other in (*sources, spared))
                if position < len(version.ids):
                    dropped.append(Drop(len(more), position))
                    more.append(version)
        return more, dropped

    def _versions(self, source: Source) -> Iterator[Source]:
        """What lies under the keys of partial splices on the way to ``source``: a replacement's prefill is one."""
        for end in source.lineage.entries:
            ordered, positions = self._by_end.get(end, (source.lineage, ()))
            for position in sorted(positions):
                yield Source(source.ids, ordered.prefilled_from(position))
