"""What the policies share that clear tool results once a trigger is reached."""

from __future__ import annotations

from collections.abc import Iterable

from leyline_client.policy import Edit, MessageView, Transcript

HYSTERESIS = 10
"""Where no ``clear_at_least`` is given, one clearing must free this fraction of the trigger (one tenth)."""


def worthwhile(transcript: Transcript, plans: Iterable[list[Edit]], trigger: int, at_least: int | None) -> list[Edit]:
    """All of ``plans``, or nothing where they free too little.

    A floor under every clearing is what keeps a conversation that stays above its trigger (because what is kept
    fills it) from clearing one more output in every turn.
    """
    edits = [edit for plan in plans for edit in plan]
    if not edits:
        return []
    floor = max(1, trigger // HYSTERESIS if at_least is None else at_least)
    return edits if transcript.gain(edits) >= floor else []


def clearable(transcript: Transcript, view: MessageView) -> bool:
    """A tool result that may be cleared by age: not protected, nothing edited in it, not asked for again."""
    return not (view.protected or view.edited or transcript.asked_again(view))
