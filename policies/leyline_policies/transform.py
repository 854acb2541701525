"""``transform``: any function from messages to messages, turned into edits by comparing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Annotated, Any, ClassVar

from pydantic import Field

from leyline_client import PolicyError
from leyline_client._edits import part_text
from leyline_client.policy import Edit, MessageView, Mode, Part, PolicyBase, Transcript

from ._fields import FROM_NAME

MAX_LINES = 2_000
"""Texts of more lines that differ are compared by their common beginning and end only."""

Messages = list[dict[str, Any]]


def same(messages: Messages) -> Messages:
    """The function that changes nothing."""
    return messages


def short_results(messages: Messages, limit: int = 50) -> Messages:
    """An example: tool results of more than ``limit`` characters lose the rest."""
    for message in messages:
        if message["role"] == "tool" and isinstance(message["content"], str) and len(message["content"]) > limit + 3:
            message["content"] = message["content"][:limit] + "..."
    return messages


class Transform(PolicyBase):
    """Brings history processors that exist already: the function gets a copy of the history, its result is compared.

    It sees the whole unedited history each turn, and should give the same result for the same history. It may
    shorten texts and leave messages out (calls with their results); it may not reorder messages or add new ones, for
    which there is no edit. Changes to system messages and to the current turn are left out, not refused: such
    functions often make them.
    """

    name = "transform"
    summary = "Any function from messages to messages, turned into edits."
    origin = "Leyline paper"
    removes_messages: ClassVar[bool] = True
    examples = ({"function": "leyline_policies.transform:short_results"},)

    function: Annotated[Callable[[Messages], Sequence[Mapping[str, Any]]], FROM_NAME] = Field(
        default=same, exclude=True
    )
    """The function, or ``module:function``."""
    mode: Mode = Mode.AMORTIZE
    """Mode of all its edits."""

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Compares the function's result with its input."""
        # Only read: a second copy of the whole history would cost as much as the rest.
        before = [transcript.raw_message(view.index) for view in transcript.messages]
        after = [dict(message) for message in self.function([view.copy() for view in transcript.messages])]
        if before == after:
            return []
        edits: list[Edit] = []
        pairs = self._align(before, after)
        gone = {
            view.group
            for view in transcript.messages
            if view.index not in pairs and (view.protected or view.is_task or view.is_system)
        }
        for view in transcript.messages:
            if view.protected:
                continue
            match = pairs.get(view.index)
            if match is not None:
                edits += self._compare(view, after[match])
            elif view.group not in gone and not view.is_task:
                edits.append(view.remove(self.mode))
        return edits

    def _align(self, before: Sequence[Mapping[str, Any]], after: Messages) -> dict[int, int]:
        """Which message of ``before`` became which of ``after``: equal ones first, then those of one identity."""
        old, new = [_identity(message) for message in before], [_identity(message) for message in after]
        if old == new:
            return {index: index for index in range(len(old))}
        pairs: dict[int, int] = {}
        full = [[json.dumps(one, sort_keys=True, default=str) for one in side] for side in (before, after)]
        low_old = low_new = 0
        blocks = SequenceMatcher(None, full[0], full[1], autojunk=False).get_matching_blocks()
        for block in blocks:
            inner = SequenceMatcher(None, old[low_old : block.a], new[low_new : block.b], autojunk=False)
            for one in inner.get_matching_blocks():
                pairs.update({low_old + one.a + k: low_new + one.b + k for k in range(one.size)})
            pairs.update({block.a + k: block.b + k for k in range(block.size)})
            low_old, low_new = block.a + block.size, block.b + block.size
        if len(pairs) < len(after):
            raise PolicyError("the function adds, reorders or changes the role of messages", policy=self.name)
        return pairs

    def _compare(self, view: MessageView, after: dict[str, Any]) -> list[Edit]:
        edits: list[Edit] = []
        for (part, call), text in view.texts.items():
            changed = part_text(after, part, call)
            if changed is None:
                if part is Part.ARGUMENTS:
                    raise PolicyError("the function removes tool calls from a message it keeps", policy=self.name)
                changed = ""
            if changed != text:
                edits += [
                    Edit(message=view.index, part=part, call=call, start=a, end=b, replacement=new, mode=self.mode)
                    for a, b, new in _differences(text, changed)
                ]
        return edits


def _identity(message: Mapping[str, Any]) -> tuple[str, ...]:
    calls = message.get("tool_calls") or ()
    return (str(message.get("role")), str(message.get("tool_call_id")), *(str(call.get("id")) for call in calls))


def _differences(before: str, after: str) -> list[tuple[int, int, str]]:
    """Disjoint replacements that turn ``before`` into ``after``: by lines, each narrowed to what differs."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    if max(len(old), len(new)) > MAX_LINES:
        return [_narrowed(before, 0, len(before), after)]
    offsets = [0]
    for line in old:
        offsets.append(offsets[-1] + len(line))
    return [
        _narrowed(before, offsets[low], offsets[high], "".join(new[start:end]))
        for kind, low, high, start, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if kind != "equal"
    ]


def _narrowed(before: str, start: int, end: int, after: str) -> tuple[int, int, str]:
    head = 0
    while start + head < end and head < len(after) and before[start + head] == after[head]:
        head += 1
    tail = 0
    while start + head < end - tail and head < len(after) - tail and before[end - tail - 1] == after[-tail - 1]:
        tail += 1
    return start + head, end - tail, after[head : len(after) - tail]
