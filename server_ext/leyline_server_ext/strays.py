"""KV of a session that none of its views names: what forget's certificate has to find all the same.

A turn that came to nothing (the client went away, the engine gave up) leaves the replacements it prefilled and what it
spliced, under keys that the session never moved on to; an undo or a history cut leaves the view before. The next turn
may well find such KV and use it, so it stays where it is, for LRU to take; but a forget, a purge or the session's end
drops it. Pure: no SGLang, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from .diff import common_prefix
from .lineage import key_elements
from .orders import Drop, Order, Source
from .views import Plan, View

LIMIT = 8
"""Strays of a session beyond which its next order releases them all; arrays of token ids are not free."""
MOST = 8 * LIMIT
"""Never more than these, the latest: so many turns in a row came to nothing that no order was ever carried out."""

Strays = tuple[Source, ...]


def of_view(view: View) -> Source:
    """The key of ``view``."""
    return Source(view.ids, view.lineage)


def attempts(plan: Plan) -> Strays:
    """Keys under which serving ``plan`` may put KV: its internal prefills, the prompt, the prompt without a splice."""
    warmed = tuple(Source(plan.target[:length], lineage) for length, lineage in plan.warmups)
    prompt = Source(plan.target, plan.lineage)
    if not plan.rotates:
        return (*warmed, prompt)
    return (*warmed, prompt, Source(plan.target, plan.lineage.prefilled_from(plan.order.pieces[0].start)))


def joined(strays: Strays, more: Iterable[Source]) -> Strays:
    """``strays`` and ``more``, the latest last, none within another; at most `MOST`."""
    result = list(strays)
    for new in more:
        if any(_within(new, old) for old in result):
            continue
        result = [old for old in result if not _within(old, new)]
        result.append(new)
    return tuple(result[-MOST:])


def pruned(strays: Strays, view: Source) -> Strays:
    """``strays`` less those that lie within ``view``: whoever drops the view drops them."""
    return tuple(stray for stray in strays if not _within(stray, view))


def drops(sources: Sequence[Source], strays: Strays, spared: Sequence[Source]) -> tuple[Strays, tuple[Drop, ...]]:
    """``sources`` with ``strays`` behind them, and what to drop of these: all but what ``spared`` has as well."""
    found, dropped = list(sources), []
    for stray in strays:
        position = max((shared(stray, other) for other in spared), default=0)
        if position < len(stray.ids):
            dropped.append(Drop(len(found), position))
            found.append(stray)
    return tuple(found), tuple(dropped)


def forgetting(order: Order, strays: Strays, spared: Sequence[Source]) -> Order:
    """``order``, forgetting ``strays`` as well."""
    sources, dropped = drops(order.sources, strays, spared)
    return replace(order, sources=sources, forget=(*order.forget, *dropped))


def releasing(order: Order, strays: Strays, spared: Sequence[Source]) -> Order:
    """``order``, releasing ``strays`` as well."""
    sources, dropped = drops(order.sources, strays, spared)
    return replace(order, sources=sources, release=(*order.release, *dropped))


def shared(a: Source, b: Source) -> int:
    """Length of the common prefix of two keys."""
    if a.lineage == b.lineage:
        return common_prefix(a.ids, b.ids)
    return common_prefix(key_elements(a.ids, a.lineage), key_elements(b.ids, b.lineage))


def _within(a: Source, b: Source) -> bool:
    """Whether key ``a`` is a prefix of key ``b``."""
    count = len(a.ids)
    return count <= len(b.ids) and np.array_equal(a.ids, b.ids[:count]) and shared(a, b) == count
