"""What can be dropped at once without breaking a conversation."""

from __future__ import annotations

from leyline_client.policy import Edit, MessageView, Transcript

Unit = list[MessageView]


def units(transcript: Transcript) -> list[Unit]:
    """Droppable units, oldest first. What is removed already, and what must stay, is in none.

    An exchange (a user message and all that follows up to the next one) that is over is one unit, so that roles still
    alternate, as some chat templates demand. In an exchange of which something must stay, the one going on among them,
    each assistant message with its tool results is a unit.
    """
    exchanges: list[list[Unit]] = []
    before = ""
    for group in transcript.groups:
        head = group[0]
        if head.is_system:
            continue
        if not exchanges or (head.role == "user" and before != "user"):
            exchanges.append([])
        before = head.role
        if not head.removed:
            exchanges[-1].append(list(group))
    return [unit for exchange in exchanges for unit in _units_of(exchange)]


def _units_of(exchange: list[Unit]) -> list[Unit]:
    stays = [any(view.protected or view.is_task for view in unit) for unit in exchange]
    if exchange and not any(stays):
        return [[view for unit in exchange for view in unit]]
    return [unit for unit, stay in zip(exchange, stays, strict=True) if not stay and unit[0].role != "user"]


def removed(unit: Unit) -> list[Edit]:
    """Edits that remove a unit; where something in it is edited already, that takes the rest of its text out."""
    whole = [view for view in unit if not view.removed]
    if any(view.edited for view in whole):
        return emptied(unit)
    return [view.remove() for view in whole]


def emptied(unit: Unit, stub: str = "", *, keep: MessageView | None = None) -> list[Edit]:
    """Edits that take the text out of a unit's messages and leave these standing; the content of ``keep`` stays."""
    edits: list[Edit] = []
    for view in unit:
        if view.removed:
            continue
        edits += [*(view.clear(stub) if view is not keep else ()), *view.clear_reasoning()]
        for call in view.calls:
            edits += view.clear_arguments(call.number)
    return edits
