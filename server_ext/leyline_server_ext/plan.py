"""From what a session holds and the tokens of its next prompt to a splice plan. Pure: no SGLang, no torch.

::

    source  |--------- kept ---------|## evicted ##|------- kept -------|
    target  |--------- kept ---------|rr|------- kept -------|++ new ++|
                                     ^  ^                    ^
                                start   piece.start          piece.end
                                        first lineage entry

``rr`` is the replacement, prefilled on top of the edited prefix (its KV is a function of the key before it, so it keeps
that key's signature); the kept run after it is one `Piece`, moved by Δ, under a new signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from leyline_client._models import CompiledDirective, Mode

from .diff import Hunk
from .lineage import CLEAN, CLEAN_LINEAGE, Ids, Lineage, canonical, key_elements, prefill_mark, sign
from .orders import Candidate, Drop, Order, Piece, Source
from .strays import of_view, shared
from .views import MAX_ANCESTORS, Ancestor, Change, Plan, Run, View, as_ids, compose, unlike_from

__all__ = ["MAX_ANCESTORS", "Ancestor", "Change", "Plan", "Run", "View", "as_ids", "compose", "make_plan"]


def make_plan(
    view: View,
    ancestors: Sequence[Ancestor],
    target: Ids,
    changes: Sequence[Change],
    *,
    kept: int,
    page_size: int = 1,
    release: bool = True,
) -> Plan:
    """Plan ``target`` from ``view``.

    Args:
        view: the session's current view.
        ancestors: earlier views, oldest first, whose KV may still be cached.
        target: the next prompt's tokens.
        changes: ascending, disjoint; after each, ``view`` tokens are kept up to the next change or to ``kept``.
        kept: view position after which nothing is kept.
        page_size: of the KV pool, in tokens.
        release: drop the view's tail from the cache once it is spliced.
    """
    if not changes:
        return Plan(target, _continued(view.lineage, kept, len(target), page_size))
    # The last token of a view was sampled but never fed back: it has no KV. The tree holds whole pages of the rest.
    fed = max(len(view.ids) - 1, 0)
    cached = min(kept, fed // page_size * page_size)
    return _Planner(view, ancestors, target, _merged(changes), page_size, cached, release).plan()


@dataclass(frozen=True, slots=True)
class _Stub:
    """A replacement that kept text follows: target positions ``[start, end)``, prefilled under ``lineage``.

    On a page grid its prefill starts where its first page does, and runs on to fill its last one.
    """

    start: int
    end: int
    length: int
    """Tokens of the internal prefill."""
    lineage: Lineage
    own: int
    """From this page on the internal prefill's KV serves nothing but to be copied from."""


@dataclass(slots=True)
class _Planner:
    view: View
    ancestors: Sequence[Ancestor]
    target: Ids
    changes: Sequence[Change]
    page: int
    cached: int
    release: bool
    entries: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    stubs: list[_Stub] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    suppliers: tuple[int, ...] = ()
    """Numbers of the ancestors that may supply KV, oldest first."""

    def plan(self) -> Plan:
        amortized, forget = self._split_at_forget()
        first = self.changes[0].hunk
        self.entries = [e for e in self.view.lineage.entries if e[0] < first.source_start]
        self.sources = [
            Source(self.view.ids, self.view.lineage),
            *(Source(a.view.ids, a.view.lineage) for a in self.ancestors),
        ]
        self.suppliers = _suppliers(self.ancestors, len(self.view.ids))
        for index, change in enumerate(amortized):
            end = self.changes[index + 1].hunk.source_start if index + 1 < len(self.changes) else self.cached
            if index + 1 == len(amortized) and forget is not None and _drops(forget):
                # What is forgotten takes its page along, before anything is copied from there.
                end = end // self.page * self.page
            self._keep(change.hunk, min(end, self.cached))
        lineage = self._to_page_grid()
        return Plan(
            target=self.target,
            lineage=lineage,
            order=self._order(forget),
            warmups=tuple((stub.length, stub.lineage) for stub in self.stubs),
            warmed=self._warmed(),
            runs=tuple(self.runs),
            directives=tuple(_compiled(change) for change in self.changes),
            forget_from=None if forget is None else forget.hunk.target_start,
        )

    def _split_at_forget(self) -> tuple[list[Change], Change | None]:
        """A forget anywhere makes everything from its start a re-prefill; amortize edits before it stand."""
        for index, change in enumerate(self.changes):
            if change.mode is Mode.FORGET:
                return list(self.changes[:index]), change
        return list(self.changes), None

    def _keep(self, hunk: Hunk, end: int) -> None:
        """The run after ``hunk``, up to source position ``end``: its signature and its piece."""
        start, shift = hunk.source_end, hunk.target_end - hunk.source_end
        # The engine computes the last prompt token whatever is cached: its KV need not be brought.
        end = min(end, len(self.target) - 1 - shift)
        if end <= start:
            return
        if hunk.target_end > hunk.target_start:
            self._replace(hunk)
        signature = sign(
            self._signature(),
            hunk.target_end,
            self._elements(hunk.source_start, hunk.source_end),
            self.target[hunk.target_start : hunk.target_end].tobytes(),
            self.view.lineage.signature_at(start).to_bytes(8, "little"),
        )
        self.entries.append((hunk.target_end, signature))
        for position, inner in self.view.lineage.entries:
            if start < position < end:
                signature = sign(signature, position + shift, inner.to_bytes(8, "little"))
                self.entries.append((position + shift, signature))
        self.runs.append(Run(start + shift, end + shift, start))
        self.pieces += self._pieces(start, end, shift)

    def _replace(self, hunk: Hunk) -> None:
        """How the replacement comes about: by an internal prefill from the page that holds its first token.

        What that page holds before the replacement is computed again. Where that was spliced KV, what is computed now
        is not the same: the internal prefill gets the key of an honest continuation, and the replacement's KV, a
        function of that, a signature of its own.
        """
        start = hunk.target_start
        spliced = self.pieces[-1].end if self.pieces else min(self.view.lineage.spliced_until, start)
        head = start // self.page * self.page
        entries = canonical(self.entries)
        under = Lineage(entries, spliced if entries else 0).before(head) if entries else CLEAN_LINEAGE
        length = min(-(-hunk.target_end // self.page) * self.page, len(self.target))
        recomputed = bool(entries) and head < spliced
        own = head if recomputed else hunk.target_end // self.page * self.page
        self.stubs.append(_Stub(start, hunk.target_end, length, under, own))
        if recomputed:
            self.entries.append((start, sign(self._signature(), start, b"replacement", head.to_bytes(8, "little"))))
        elif entries and spliced == start:
            self.entries.append((start, prefill_mark(self._signature(), start)))

    def _signature(self) -> int:
        return self.entries[-1][1] if self.entries else CLEAN

    def _elements(self, start: int, end: int) -> bytes:
        return key_elements(self.view.ids[:end], self.view.lineage)[start:end].tobytes()

    def _pieces(self, start: int, end: int, shift: int) -> list[Piece]:
        """Cut a kept run where the oldest ancestor that holds it changes."""
        cuts = sorted(
            {start, end}
            | {p for _, runs in self._suppliers() for run in runs for p in (run.start, run.end) if start < p < end}
        )
        pieces: list[Piece] = []
        for low, high in pairwise(cuts):
            found = []
            for number, runs in self._suppliers():
                for run in runs:
                    if run.start <= low and high <= run.end:
                        origin = run.origin + low - run.start
                        age = self.ancestors[number - 1].view.generation(origin, origin + high - low)
                        found.append(Candidate(number, origin, age))
            # The oldest, one more in case it is gone, and the view.
            found = [*found[:2], Candidate(0, low, self.view.generation(low, high))]
            piece = Piece(low + shift, high + shift, tuple(found))
            if pieces and _continues(pieces[-1], piece):
                piece = replace(pieces.pop(), end=piece.end)
            pieces.append(piece)
        return pieces

    def _suppliers(self) -> list[tuple[int, list[Run]]]:
        """Ancestors that may supply KV, by number, with the runs whose KV is the view's."""
        return [(number, [run for run in self.ancestors[number - 1].runs if run.alike]) for number in self.suppliers]

    def _to_page_grid(self) -> Lineage:
        """The lineage of the target. The tree holds whole pages: what sticks out of the last one is prefilled."""
        end = floor = self.pieces[-1].end if self.pieces else 0
        while self.pieces:
            floor = min(self.pieces[-1].end, floor) // self.page * self.page
            if self.pieces[-1].start < floor:
                break
            self.pieces.pop()
        self.stubs = [stub for stub in self.stubs if self.pieces and stub.end <= self.pieces[-1].start]
        self.runs = list(unlike_from(self.runs, floor if self.pieces else 0))
        if not self.pieces:
            return _continued(self.view.lineage, self.changes[0].hunk.source_start, len(self.target), self.page)
        self.pieces[-1] = replace(self.pieces[-1], end=floor)
        return Lineage(canonical(self.entries), end).before(floor)

    def _order(self, forget: Change | None) -> Order:
        pieces, fillers = tuple(self.pieces), tuple[Drop, ...]()
        if self.page > 1 and pieces:
            pieces, fillers = self._with_whole_pages()
        keep_from = self.changes[0].hunk.source_start
        # A tail that nothing of is kept goes as well: the point of evicting is to free memory.
        release = (Drop(0, keep_from),) if self.release and (pieces or forget is None) else ()
        drops: tuple[Drop, ...] = ()
        if forget is not None and _drops(forget):
            drops = self._forget_drops(forget.hunk)
        used = {c.source for p in pieces for c in p.candidates} | {d.source for d in (*release, *fillers, *drops)}
        order = Order(tuple(self.sources), pieces, drops, release + fillers, exclusive=bool(release))
        return _renumbered(order, sorted(used), self.page)

    def _warmed(self) -> int:
        """Tokens that the internal prefills compute: from the page of the replacement, or what the one before left."""
        computed, before = 0, None
        for stub in self.stubs:
            found = stub.start // self.page * self.page
            if before is not None and before.lineage == stub.lineage:
                found = max(found, before.length)
            # As of any prompt, the last page is computed even where it is cached.
            computed += stub.length - min(found, (stub.length - 1) // self.page * self.page)
            before = stub
        return computed

    def _with_whole_pages(self) -> tuple[tuple[Piece, ...], tuple[Drop, ...]]:
        """Also name where the tokens come from that share a page with a piece: prefix tail and replacements (Δ = 0).

        Returns:
            The pieces, and drops for the pages that internal prefills made only to be copied from.
        """
        result: list[Piece] = []
        fillers: list[Drop] = []
        stubs = {stub.end: stub for stub in self.stubs}
        position = self.changes[0].hunk.target_start
        floor = position // self.page * self.page
        if floor < position:
            result.append(Piece(floor, position, (Candidate(0, floor, self.view.generation(floor, position)),)))
        for piece in self.pieces:
            if piece.start > position:
                stub = stubs[piece.start]
                number = len(self.sources)
                self.sources.append(Source(self.target[: stub.length], stub.lineage))
                result.append(Piece(position, piece.start, (Candidate(number, position, 0),), prefilled=True))
                fillers.append(Drop(number, stub.own))
            result.append(piece)
            position = piece.end
        return tuple(result), tuple(fillers)

    def _forget_drops(self, hunk: Hunk) -> tuple[Drop, ...]:
        """Every view of the session that holds forgotten tokens loses them and what was computed after them."""
        drops = [Drop(0, hunk.source_start)]
        for number, ancestor in enumerate(self.ancestors, start=1):
            held = [
                run.origin + max(run.start, hunk.source_start) - run.start
                for run in ancestor.runs
                if run.start < hunk.source_end and hunk.source_start < run.end
            ]
            # Runs do not say what both views have before the first change between them: there they share nodes.
            if hunk.source_start < shared(of_view(ancestor.view), of_view(self.view)):
                held.append(hunk.source_start)
            if held:
                drops.append(Drop(number, min(held)))
        return tuple(drops)


def _merged(changes: Sequence[Change]) -> list[Change]:
    """Changes with something kept between them: the signature of a kept run covers all that was evicted before it."""
    result: list[Change] = []
    for change in changes:
        last = result[-1] if result else None
        if last is not None and last.mode is change.mode and last.hunk.source_end == change.hunk.source_start:
            hunk = replace(last.hunk, source_end=change.hunk.source_end, target_end=change.hunk.target_end)
            result[-1] = Change(hunk, change.mode, last.declared or change.declared)
        else:
            result.append(change)
    return result


def _drops(forget: Change) -> bool:
    """Whether cached KV is dropped. An agent that edits its own history gets what a plain server does; the certificate
    is for those who ask; and an insertion forgets nothing.
    """
    return forget.declared and forget.hunk.source_start < forget.hunk.source_end


def _continued(lineage: Lineage, kept: int, length: int, page: int) -> Lineage:
    """``lineage`` when of its first ``kept`` tokens as many are used as a prompt of ``length`` tokens can find cached.

    That is whole pages, and never the last prompt token.
    """
    return lineage.before(max(0, min(kept, length - 1)) // page * page)


def _suppliers(ancestors: Sequence[Ancestor], length: int) -> tuple[int, ...]:
    """The ancestors that are the oldest to hold the most tokens of a view of ``length`` tokens.

    No more than `MAX_ANCESTORS`: an order must not grow with the session's age.
    """
    covered = np.zeros(length, dtype=bool)
    first: list[tuple[int, int]] = []
    for number, ancestor in enumerate(ancestors, start=1):
        new = 0
        for run in (run for run in ancestor.runs if run.alike):
            new += int((~covered[run.start : run.end]).sum())
            covered[run.start : run.end] = True
        first.append((-new, number))
    return tuple(sorted(number for new, number in sorted(first)[:MAX_ANCESTORS] if new))


def _continues(before: Piece, piece: Piece) -> bool:
    """Whether ``piece`` comes from where ``before`` would go on."""
    moved = before.end - before.start
    return piece.candidates == tuple(replace(c, start=c.start + moved) for c in before.candidates)


def _renumbered(order: Order, used: list[int], page: int) -> Order:
    """Only the sources that are needed, and only as much of each as is needed: whole pages, as the tree has them."""
    number = {old: new for new, old in enumerate(used)}
    needed = dict.fromkeys(used, 0)
    for piece in order.pieces:
        for c in piece.candidates:
            end = -(-(c.start + piece.end - piece.start) // page) * page
            needed[c.source] = max(needed[c.source], min(end, len(order.sources[c.source].ids)))
    for drop in (*order.forget, *order.release):
        needed[drop.source] = len(order.sources[drop.source].ids)
    sources = tuple(
        Source(order.sources[old].ids[: needed[old]], order.sources[old].lineage.before(needed[old])) for old in used
    )
    return Order(
        sources=sources,
        pieces=tuple(
            replace(p, candidates=tuple(replace(c, source=number[c.source]) for c in p.candidates))
            for p in order.pieces
        ),
        forget=tuple(Drop(number[d.source], d.position) for d in order.forget),
        release=tuple(Drop(number[d.source], d.position) for d in order.release),
        exclusive=order.exclusive,
    )


def _compiled(change: Change) -> CompiledDirective:
    hunk = change.hunk
    return CompiledDirective(
        start=hunk.source_start,
        end=hunk.source_end,
        replacement_tokens=hunk.target_end - hunk.target_start,
        mode=change.mode,
        declared=change.declared,
    )
