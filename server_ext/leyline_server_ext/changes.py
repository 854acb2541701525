"""Which change gets which mode: declared by an edit, or made by the agent itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from leyline_client._errors import HistoryEdited
from leyline_client._models import Directive, Edit, Mode, Part
from leyline_client._wire import PartSpan

from .diff import Hunk
from .plan import Change

OnHistoryEdit = Literal["amortize", "forget", "error"]
_SLACK = 4
"""Tokens by which a change may stick out of its edit: the tokeniser merges across the edit's border."""


def digest_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """One digest per message; equal messages have equal digests."""
    return tuple(
        hashlib.blake2b(json.dumps(message, sort_keys=True, default=str).encode(), digest_size=12).digest()
        for message in messages
    )


def history_extends(before: Sequence[bytes], now: Sequence[bytes]) -> bool:
    """Whether the agent only appended, or took back its last messages (a retry): it changed none that others follow."""
    common = min(len(before), len(now))
    return before[:common] == now[:common]


def classify(
    hunks: Sequence[Hunk],
    *,
    edits: Sequence[Edit | Directive],
    edits_before: Sequence[Edit | Directive],
    extends: bool,
    on_history_edit: OnHistoryEdit,
    spans: Callable[[], Sequence[PartSpan]],
) -> list[Change]:
    """Give every hunk its mode.

    Args:
        hunks: what changed, ascending.
        edits: standing edits of this turn.
        edits_before: those of the turn before.
        extends: see `history_extends`.
        on_history_edit: mode of what no edit declares.
        spans: spans of the edited texts in the target; asked for only where it matters, since it costs a rendering.

    Raises:
        HistoryEdited: the agent changed its history and ``on_history_edit`` is ``"error"``.
    """
    if not hunks:
        return []
    changed = _symmetric_difference(edits, edits_before)
    if not extends and on_history_edit == "error":
        raise HistoryEdited("the history is no extension of the session's", param="messages")
    undeclared = Mode.AMORTIZE if on_history_edit == "amortize" else Mode.FORGET
    if not changed:
        return [Change(hunk, undeclared, declared=False) for hunk in hunks]
    modes = {edit.mode for edit in changed}
    if extends and len(modes) == 1:
        mode = modes.pop()
        return [Change(hunk, mode) for hunk in hunks]
    return [_by_span(hunk, changed, spans(), undeclared) for hunk in hunks]


def _symmetric_difference(
    now: Sequence[Edit | Directive], before: Sequence[Edit | Directive]
) -> list[Edit | Directive]:
    seen, known = set(before), set(now)
    return [edit for edit in now if edit not in seen] + [edit for edit in before if edit not in known]


def _by_span(hunk: Hunk, edits: Sequence[Edit | Directive], spans: Sequence[PartSpan], undeclared: Mode) -> Change:
    """The mode of the edit whose text the hunk lies in; forget wins where several touch it."""
    where = {(span.message, span.part, span.call): span for span in spans}
    modes = set()
    for edit in edits:
        if isinstance(edit, Directive) or edit.part is Part.MESSAGE:
            # A removed message has no text in the target: any pure deletion may be it.
            if isinstance(edit, Directive) or hunk.target_start == hunk.target_end:
                modes.add(edit.mode)
            continue
        span = where.get((edit.message, edit.part, edit.call))
        if span and span.start - _SLACK <= hunk.target_start and hunk.target_end <= span.end + _SLACK:
            modes.add(edit.mode)
    if not modes:
        return Change(hunk, undeclared, declared=False)
    return Change(hunk, Mode.FORGET if Mode.FORGET in modes else Mode.AMORTIZE)


def from_directives(directives: Sequence[Directive]) -> list[Change]:
    """Changes of a checked token-level batch.

    Directives that touch become one change (there is nothing kept between them); forget wins.
    """
    changes: list[Change] = []
    shift = 0
    for directive in directives:
        start = directive.start + shift
        hunk = Hunk(directive.start, directive.end, start, start + len(directive.replacement))
        shift += directive.delta
        last = changes[-1] if changes else None
        if last is not None and last.hunk.source_end == hunk.source_start:
            merged = Hunk(last.hunk.source_start, hunk.source_end, last.hunk.target_start, hunk.target_end)
            mode = Mode.FORGET if Mode.FORGET in (last.mode, directive.mode) else Mode.AMORTIZE
            changes[-1] = Change(merged, mode)
        else:
            changes.append(Change(hunk, directive.mode))
    return changes
