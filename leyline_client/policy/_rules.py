"""The rules no plan may break. Each has a stable name, which `PolicyRuleError.rule` carries."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

from leyline_client._errors import PolicyRuleError
from leyline_client._models import Edit, Mode, Part

from ._base import Policy
from ._spans import Span
from ._transcript import Transcript

Refuse = Callable[[str, str], PolicyRuleError]

RULES = {
    "edits": "A plan is a sequence of Edit objects.",
    "in-range": "Every edit names a message, part, call and span that is there.",
    "system-prompt": "System and developer messages are untouched, wherever they stand.",
    "current-turn": "The turn the model has not answered yet is untouched.",
    "current-task": "The newest user message is neither removed nor cleared; a redaction (mode forget) may replace it.",
    "message-count": "Messages are removed only by a policy that declares removes_messages.",
    "pairing": "A tool call and all its results stay together, or go together.",
    "valid-arguments": "Arguments that were a JSON object still are one.",
    "no-repeat": "No text is edited twice in one plan.",
    "deterministic": "The same transcript gives the same edits.",
    "byte-stable": "The same edit has the same replacement, byte for byte.",
    "pure": "Planning changes no message.",
}


def check_plan(policy: Policy, transcript: Transcript, edits: Sequence[Edit]) -> None:
    """Raises PolicyRuleError for the first rule that ``edits``, as the policy returned them, break."""

    def refuse(rule: str, why: str) -> PolicyRuleError:
        return PolicyRuleError(why, policy=policy.name, rule=rule)

    for edit in edits:
        _check_edit(edit, transcript, refuse, bool(getattr(policy, "removes_messages", False)))
    _check_no_repeat(edits, transcript, refuse)
    _check_pairing(edits, transcript, refuse)


def check_result(policy: Policy, transcript: Transcript, edits: Sequence[Edit]) -> None:
    """Raises PolicyRuleError where what ``edits`` leave over breaks a rule. They already stand in ``transcript``."""
    for edit in edits:
        view = transcript.messages[edit.message]
        if view.is_task and edit.part is Part.CONTENT and _cleared(transcript, edit):
            raise PolicyRuleError(
                f"message {edit.message}, the newest of the user, would lose all its text",
                policy=policy.name,
                rule="current-task",
            )
        if edit.part is Part.ARGUMENTS:
            where = (Part.ARGUMENTS, edit.call)
            if _is_object(view.texts[where]) and not _is_object(transcript.text_now(edit.message, where)):
                raise PolicyRuleError(
                    f"the arguments of call {edit.call} of message {edit.message} would no longer be a JSON object",
                    policy=policy.name,
                    rule="valid-arguments",
                )


def _cleared(transcript: Transcript, edit: Edit) -> bool:
    view = transcript.messages[edit.message]
    if not view.text.strip() or any(view.text[start:end].strip() for start, end in view.free()):
        return False
    # A redaction may replace all of it; an empty message is none.
    return edit.mode is not Mode.FORGET or not view.now().strip()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _check_edit(edit: Edit, transcript: Transcript, refuse: Refuse, removes: bool) -> None:
    index = edit.message
    if index >= len(transcript.messages):
        raise refuse("in-range", f"there is no message {index} of {len(transcript.messages)}")
    view = transcript.messages[index]
    if view.is_system:
        raise refuse("system-prompt", f"message {index} is a {view.role} message")
    if view.protected:
        raise refuse("current-turn", f"message {index} belongs to the current turn")
    if edit.part is Part.MESSAGE:
        if not removes:
            raise refuse("message-count", f"removes message {index} without declaring removes_messages")
        if view.is_task:
            raise refuse("current-task", f"removes message {index}, the newest of the user")
        return
    text = view.texts.get((edit.part, edit.call))
    if text is None:
        raise refuse("in-range", f"message {index} has no text in its {edit.part.value} (call {edit.call})")
    end = len(text) if edit.end is None else edit.end
    if end > len(text) or (edit.start or 0) > end:
        raise refuse("in-range", f"characters {edit.start or 0} to {end} of message {index}, which has {len(text)}")


def _check_no_repeat(edits: Sequence[Edit], transcript: Transcript, refuse: Refuse) -> None:
    spans: dict[tuple[int, Part, int], list[Span]] = {}
    removed = [edit.message for edit in edits if edit.part is Part.MESSAGE]
    if len(set(removed)) < len(removed):
        raise refuse("no-repeat", "removes a message twice")
    gone = set(removed)
    for edit in edits:
        if edit.part is Part.MESSAGE:
            continue
        if edit.message in gone:
            raise refuse("no-repeat", f"edits message {edit.message} and removes it too")
        size = len(transcript.messages[edit.message].texts[edit.part, edit.call])
        span = (edit.start or 0, size if edit.end is None else edit.end)
        spans.setdefault((edit.message, edit.part, edit.call), []).append(span)
    for (index, part, _), group in spans.items():
        group.sort()
        for (low, high), (start, end) in pairwise(group):
            if start < high or (low, high) == (start, end):
                raise refuse("no-repeat", f"edits the same characters of message {index}'s {part.value} twice")


def _check_pairing(edits: Sequence[Edit], transcript: Transcript, refuse: Refuse) -> None:
    removed = {edit.message for edit in edits if edit.part is Part.MESSAGE}
    gone = removed | transcript.removed
    for index in removed:
        caller = transcript.messages[index].group
        members = (caller, *transcript.messages[caller].answers)
        left = [member for member in members if member not in gone]
        if left:
            raise refuse("pairing", f"removes message {index} but not message {left[0]} of the same tool calls")
