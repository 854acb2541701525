"""From what a policy wants to what is new: edits are clipped to the text that no standing edit touches yet."""

from __future__ import annotations

from collections.abc import Sequence

from leyline_client._models import Edit, Part

from ._transcript import Transcript
from ._view import MessageView


def settle(transcript: Transcript, edits: Sequence[Edit]) -> list[Edit]:
    """The part of ``edits`` that does not stand in ``transcript`` yet, none overlapping what does.

    A policy may restate its wishes every turn, and later policies may want more of a text than earlier ones
    cut: what stands, stays, and only the rest is new. A message that already carries edits cannot be removed any
    more (an edit of it stands): then it, and all of its tool calls and results, lose their remaining text instead.
    """
    new: list[Edit] = []
    for edit in edits:
        if transcript.messages[edit.message].removed:
            continue
        if edit.part is Part.MESSAGE:
            new += _removal(transcript, edit)
        else:
            new += _clipped(transcript.messages[edit.message], edit)
    return new


def _clipped(view: MessageView, edit: Edit) -> list[Edit]:
    size = len(view.texts[edit.part, edit.call])
    start, end = edit.start or 0, size if edit.end is None else edit.end
    key = (view.index, (edit.part, edit.call))
    covered = view._transcript.covered.get(key, ())
    if start == end:
        taken = any(low <= start <= high for low, high in covered) or view._transcript.inserted(key, start)
        return [] if taken or not edit.replacement else [edit]
    if not any(low < end and high > start for low, high in covered):
        return [edit]
    if edit.part is Part.ARGUMENTS:
        return []  # what is left of a JSON text around an edit cannot be cut by a rule of thumb
    return view.replace(start, end, edit.replacement, part=edit.part, call=edit.call, mode=edit.mode)


def _removal(transcript: Transcript, edit: Edit) -> list[Edit]:
    caller = transcript.messages[edit.message].group
    group = [transcript.messages[index] for index in (caller, *transcript.messages[caller].answers)]
    if not any(view.edited for view in group):
        return [edit]
    return hollow(transcript.messages[edit.message], edit)


def hollow(view: MessageView, edit: Edit) -> list[Edit]:
    """Edits that take the remaining text out of a message that must stay (see `MessageView.clear`)."""
    new = [*view.clear(mode=edit.mode), *view.clear_reasoning(mode=edit.mode)]
    for call in view.calls:
        new += view.clear_arguments(call.number, mode=edit.mode)
    return new
