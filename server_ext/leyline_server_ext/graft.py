"""The graft: put spliced KV under the key of the edited prompt, at the match its prefill starts from.

::

    source path   [ p p p p | e e e e | k k k k k ]      slots owned by the tree (other lineage or clean)
    target path   [ p p p p ]                            matched, locked while we work
                            [ k'k'k'k'k' ]               allocated here, filled by gather-rotate-scatter,
                                                         then owned by the tree; freed here if the kernel fails

Where the session gives its source up and nobody else holds it, the source's nodes are taken out of the tree first and
their slots become the target's: only the rotary band is touched (`rotate_in_place`), the evicted slots go free. On
pages of more than one token that goes for runs moved by whole pages; what shares a page with others is copied.

Matching happens several times per request: at every prefill attempt, and again after a retraction. Each admission
starts from what was ordered, so that what counts is the pool's state at the last one. Nothing here raises into the
scheduler: a fault is a counted reason and the prompt is prefilled. Only beside other tensor parallel ranks does it
raise: they have grafted, and would wait for this one for ever.
"""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from leyline_client._models import Reason

from . import compat
from .cache import Translators
from .kernels import KVLayout, rotate_in_place, splice
from .lineage import Lineage
from .orders import ORDER_KEY, Forged, Order, Sealer, Source
from .partly import Partly
from .paths import Paths
from .rows import Cached, Rows, Spliced, Stay, collect, gaps, picked

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """What has been done for one request so far.

    Attributes:
        order: what was ordered.
        lineage: the lineage the request came with: that of its KV if everything goes as ordered.
        rest: the client's own extra key.
        report: for the reply; counters add up over admissions, everything else is of the last one.
        forgotten: the order's ``forget`` was carried out.
        released: its ``release`` was, or the source became the target.
    """

    order: Order
    lineage: Lineage
    rest: str | None
    report: dict[str, Any]
    forgotten: bool = False
    released: bool = False


class Grafter:
    """Carries out orders on one scheduler's cache.

    Args:
        cache: the radix cache (see `leyline_server_ext.cache`).
        layout: of the KV pool; None on a server that cannot be spliced: keys are translated, nothing is grafted.
        forward_stream: the CUDA stream the model's forwards run on, or None.
        ranks: tensor parallel ranks that carry out the same orders.
    """

    def __init__(
        self,
        cache: Any,
        translators: Translators,
        sealer: Sealer,
        layout: KVLayout | None,
        forward_stream: Any = None,
        ranks: int = 1,
    ) -> None:
        self._cache, self._translators, self._sealer, self._ranks = cache, translators, sealer, ranks
        self._layout, self._stream = layout, forward_stream
        self._paths, self._spliced, self._partly = Paths(cache, translators), Spliced(), Partly()

    def admit(self, params: Any) -> Any:
        """The match a prefill starts from: forget, match, graft, and say what is really there."""
        req = params.req
        progress = self._progress(req)
        if progress is None:
            return self._cache.leyline_match(params)
        report = progress.report
        report.pop("reason", None)
        self._address(params, progress, progress.lineage)
        try:
            if not progress.forgotten:
                progress.forgotten = True
                report["dropped"], report["kept"] = self._drop(progress, progress.order.forget, params)
            result = self._cache.leyline_match(params)
            if progress.order.pieces or progress.order.release:
                result = self._graft(params, progress, result)
        except Exception:
            if self._ranks > 1:
                raise
            logger.exception("leyline: graft failed; the prompt is prefilled instead")
            report["reason"] = Reason.INTERNAL_ERROR
            result = self._cache.leyline_match(params)
        result = self._take_over(params, progress, result)
        compat.set_report(req, ORDER_KEY, report)
        return result

    def _progress(self, req: Any) -> Progress | None:
        progress: Progress | None = getattr(req, "leyline_progress", None)
        if progress is None:
            try:
                order = self._sealer.open_order(compat.order_of(req, ORDER_KEY) or "", req.cache_salt)
            except Forged:
                logger.warning("leyline: ignored an order that this server did not make")
                return None
            lineage, rest = self._translators.lineage(req.extra_key, req.cache_salt)
            report: dict[str, Any] = {"pool_before": compat.pool_counts(self._cache), "segments": [], "graft_ms": 0.0}
            report |= dict.fromkeys(("allocated", "released", "dropped", "kept", "grafted"), 0)
            progress = Progress(order, lineage, rest, report)
            req.leyline_progress = progress
        return progress

    def _address(self, params: Any, progress: Progress, lineage: Lineage) -> None:
        """Put the request and its key under ``lineage``."""
        req = params.req
        req.extra_key = params.key.extra_key = self._sealer.seal_lineage(lineage, req.cache_salt, progress.rest)

    def _drop(self, progress: Progress, drops: Any, params: Any) -> tuple[int, int]:
        if not drops:
            return 0, 0
        own = Source(np.asarray(params.key.token_ids, np.int64), progress.lineage)
        return self._paths.drop(*self._partly.along(progress.order.sources, drops, own), params.key)

    # --- the graft ------------------------------------------------------------------------------------------------

    def _graft(self, params: Any, progress: Progress, result: Any) -> Any:
        matched, node = compat.match_of(result)
        page = self._cache.page_size
        rows: Rows | None = None
        end = progress.order.pieces[-1].end if progress.order.pieces else 0
        if matched < min(end, len(params.key)) // page * page:
            if self._layout is None:
                progress.report["reason"] = Reason.UNSUPPORTED_SERVER
                return result
            started = time.perf_counter()
            with self._paths.held([node]):
                rows = self._splice(params, progress, matched, node)
            progress.report["graft_ms"] += 1e3 * (time.perf_counter() - started)
            if rows.reason is not None:
                progress.report["reason"] = rows.reason
            if not rows.count:
                return result
            progress.report["grafted"] += rows.count
            self._spliced.note(progress.lineage, rows.segments)
            result = self._cache.leyline_match(params)
        # With a full pool the source stays where it is: there may be room for the rest at the next attempt.
        if not progress.released and (rows is None or rows.reason is not Reason.POOL_EXHAUSTED):
            progress.released = True
            with self._paths.held([compat.match_of(result)[1]]):
                released, kept = self._drop(progress, progress.order.release, params)
            progress.report["released"] += released
            progress.report["cleared"] = not kept
        return result

    def _splice(self, params: Any, progress: Progress, matched: int, node: Any) -> Rows:
        """Bring in what can be had from ``matched`` on; the rows say what that was. ``node`` is held."""
        order, page = progress.order, self._cache.page_size
        ends = {
            number: self._paths.match(self._paths.key(order.sources[number], params.key)) for number in _used(order)
        }
        found: Cached = {n: (cached, self._paths.slots(source_node)) for n, (cached, source_node) in ends.items()}
        rows = collect(order.pieces, found, matched, len(params.key), page)
        if not rows.count:
            return rows
        if order.exclusive and self._in_place(params, progress, rows, node, ends):
            return rows
        if not self._fits(rows, ends):
            # Old views may fill the pool themselves. Better rotated twice than prefilled: take the newest alone.
            newest = [replace(piece, candidates=piece.candidates[-1:]) for piece in order.pieces]
            rows = max(rows, collect(newest, found, matched, len(params.key), page), key=lambda r: self._fits(r, ends))
        with self._held(rows, ends):
            self._copy(params, progress, rows, node)
        return rows

    def _held(self, rows: Rows, ends: dict[int, tuple[int, Any]]) -> AbstractContextManager[None]:
        """Hold what is copied, and only that: the pool may need what the other candidates occupy."""
        return self._paths.held([ends[source][1] for source in sorted({take.source for take in rows.takes})])

    def _fits(self, rows: Rows, ends: dict[int, tuple[int, Any]]) -> bool:
        with self._held(rows, ends):
            return 0 < rows.count <= self._paths.room()

    def _copy(self, params: Any, progress: Progress, rows: Rows, node: Any) -> None:
        """Copy ``rows`` to new slots and give them to the tree; **cuts** ``rows`` to what the pool has room for."""
        page = self._cache.page_size
        room = self._paths.room() // page * page
        if rows.count > room:
            rows.cut(rows.start + room)
            rows.reason = Reason.POOL_EXHAUSTED
        slots = self._paths.allocate(rows.count) if rows.count else None
        if slots is None:
            rows.cut(rows.start)
            rows.reason = Reason.POOL_EXHAUSTED
            return
        try:
            self._launch(splice, torch.cat(rows.slots), slots, rows.delta(), disjoint=True)
        except BaseException:
            self._paths.free(slots)
            raise
        self._paths.insert(self._translators.key(params.key), slots, rows.start, node)
        progress.report["allocated"] += rows.count

    def _in_place(
        self, params: Any, progress: Progress, rows: Rows, node: Any, ends: dict[int, tuple[int, Any]]
    ) -> bool:
        """Turn the source's own slots into the target's, where the session gives them up and nobody else holds them."""
        drop, *more = progress.order.release
        page = self._cache.page_size
        stays = rows.staying(drop.source, drop.position // page * page, page)
        if not stays:
            return False
        copied = rows.count - sum(stay.end - stay.start for stay in stays)
        others = sorted({take.source for take in rows.takes} - {drop.source})
        with self._paths.held([ends[source][1] for source in others]):
            with self._paths.held([ends[drop.source][1]]):
                fresh = self._paths.allocate(copied) if copied else rows.slots[0][:0]
            if fresh is None:
                return False
            tail = self._paths.tail(self._paths.key(progress.order.sources[drop.source], params.key), drop.position)
            if tail.kept or not tail.nodes:
                self._paths.free(fresh)
                return False
            first, taken = tail.nodes[0][1], self._paths.take(tail)
            try:
                target = self._turned(rows, stays, fresh)
            except BaseException:
                self._paths.free(taken)
                self._paths.free(fresh)
                raise
            self._paths.insert(self._translators.key(params.key), target, rows.start, node)
        kept = [(stay.origin - first, stay.origin - first + stay.end - stay.start) for stay in stays]
        spare = picked(taken, gaps(kept, len(taken)))
        self._paths.free(spare)
        progress.report["allocated"] += copied
        progress.report["released"] += len(spare)
        if not more:
            progress.released = progress.report["cleared"] = True
        return True

    def _turned(self, rows: Rows, stays: list[Stay], fresh: torch.Tensor) -> torch.Tensor:
        """Slots of ``rows``: of ``stays`` their own, turned where they lie; of the others ``fresh`` ones, filled."""
        target, deltas = torch.cat(rows.slots), rows.delta()
        moved = [(stay.start, stay.end) for stay in stays]
        rest = gaps(moved, rows.count)
        of = (lambda _: deltas) if isinstance(deltas, int) else (lambda ranges: picked(deltas, ranges))
        if rest:
            self._launch(splice, picked(target, rest), fresh, of(rest), disjoint=True)
        self._launch(rotate_in_place, picked(target, moved), of(moved), distinct=True)
        for low, high in rest:
            target[low:high], fresh = fresh[: high - low], fresh[high - low :]
        return target

    def _launch(self, kernel: Any, *arguments: Any, **vouched: bool) -> None:
        """Run a kernel where it is ordered with the forwards that write and read the same slots."""
        if self._stream is None:
            kernel(self._layout, *arguments, **vouched)
            return
        # The slots were named on this thread's stream; the KV they hold is written and read on the forwards' one.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            kernel(self._layout, *arguments, **vouched)
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                argument.record_stream(self._stream)

    # --- what is really there -------------------------------------------------------------------------------------

    def _take_over(self, params: Any, progress: Progress, result: Any) -> Any:
        """Give the request the lineage of the KV it will really have: what was not spliced is honestly prefilled."""
        report = progress.report
        matched, _ = compat.match_of(result)
        report["segments"] = self._spliced.report(progress.lineage, progress.order.pieces, matched)
        actual = progress.lineage.prefilled_from(matched)
        if actual is not progress.lineage:
            report.setdefault("reason", Reason.SOURCE_NOT_CACHED)
            self._partly.note(progress.lineage, matched)
            self._address(params, progress, actual)
            result = self._cache.leyline_match(params)
        report["lineage"] = [list(entry) for entry in actual.entries]
        report["until"] = actual.spliced_until
        report["cached"], _ = compat.match_of(result)
        report["pool_after"] = compat.pool_counts(self._cache)
        return result


def _used(order: Order) -> list[int]:
    return sorted({candidate.source for piece in order.pieces for candidate in piece.candidates})
