"""Purge: drop from the cache whatever of a session carries, or still holds, text that amortize evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .orders import EMPTY_ORDER, Drop, Order, Source
from .plan import Plan, View
from .sessions import Session
from .strays import attempts, forgetting, of_view, shared


def purge_order(session: Session, spared: Sequence[Source] = ()) -> Order:
    """Drop every view of the session from where it carries, or still holds, text that amortize evicted; and strays.

    ``spared``: keys that strays may share, because they are made for the turn that carries the order.
    """
    memory = session.memory
    first = memory.view.lineage.first
    sources: list[Source] = []
    drops: list[Drop] = []
    for view in session.views():
        position = first if view is memory.view else shared(of_view(view), of_view(memory.view))
        if position is not None:
            drops.append(Drop(len(sources), position))
            sources.append(of_view(view))
    order = Order(sources=tuple(sources), forget=tuple(drops))
    return forgetting(order, session.strays, [*map(of_view, session.views()), *spared])


def with_purge(plan: Plan, session: Session) -> Plan:
    """``plan``, carrying out `purge_order` too."""
    extra, order = purge_order(session, attempts(plan)), plan.order
    shift = len(order.sources)
    drops = tuple(Drop(drop.source + shift, drop.position) for drop in extra.forget)
    return replace(plan, order=replace(order, sources=(*order.sources, *extra.sources), forget=(*order.forget, *drops)))


def undo_order(left: View, back: View) -> Order:
    """Drop what only the view being left by ``undo`` has: nothing will name its spliced KV any more."""
    if left.lineage == back.lineage:
        return EMPTY_ORDER
    position = shared(of_view(left), of_view(back))
    return Order(sources=(of_view(left),), forget=(Drop(0, position),))
