"""Carry message-level edits out on OpenAI messages. Used by the server, by fallback mode and offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._errors import InvalidEdit
from ._models import Edit, Part

Message = Mapping[str, Any]


def apply_edits(messages: Sequence[Message], edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """The edited copy of ``messages``; the input is left alone, unedited messages are shared, not copied.

    All edits are in the coordinates of ``messages``. Several edits of one part must not overlap.

    Raises:
        InvalidEdit: an edit names a message, part or span that is not there; ``param`` names it.
    """
    by_message: dict[int, list[tuple[int, Edit]]] = {}
    for number, edit in enumerate(edits):
        if edit.message >= len(messages):
            raise _invalid(number, "message", f"there are only {len(messages)} messages")
        by_message.setdefault(edit.message, []).append((number, edit))
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        numbered = by_message.get(index)
        if numbered is None:
            result.append(dict(message))
            continue
        if any(edit.part is Part.MESSAGE for _, edit in numbered):
            if len(numbered) > 1:
                raise _invalid(numbered[1][0], "message", "the message is removed by another edit")
            continue
        result.append(_edit_message(message, numbered))
    return result


def part_text(message: Message, part: Part, call: int = 0) -> str | None:
    """The text an edit of ``part`` works on, or None where the message has no such part."""
    if part is Part.CONTENT:
        content = message.get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, Sequence):
            return "".join(str(block.get("text", "")) for block in content if _is_text(block))
        return None
    if part is Part.REASONING:
        text = message.get("reasoning_content")
        return text if isinstance(text, str) else None
    if part is Part.ARGUMENTS:
        calls = message.get("tool_calls")
        if isinstance(calls, Sequence) and call < len(calls):
            arguments = calls[call].get("function", {}).get("arguments")
            return arguments if isinstance(arguments, str) else None
    return None


def _is_text(block: object) -> bool:
    return isinstance(block, Mapping) and block.get("type") in {"text", "input_text", "output_text"}


def _invalid(number: int, field: str, message: str) -> InvalidEdit:
    return InvalidEdit(message, param=f"leyline.edits[{number}].{field}", detail={"index": number})


def _edit_message(message: Message, numbered: list[tuple[int, Edit]]) -> dict[str, Any]:
    edited = dict(message)
    parts: dict[tuple[Part, int], list[tuple[int, Edit]]] = {}
    for number, edit in numbered:
        parts.setdefault((edit.part, edit.call), []).append((number, edit))
    for (part, call), group in parts.items():
        text = part_text(message, part, call)
        if text is None:
            raise _invalid(group[0][0], "part", f"message {group[0][1].message} has no text in its {part.value}")
        edited = with_part_text(edited, part, call, _replace(text, group))
    return edited


def _replace(text: str, group: list[tuple[int, Edit]]) -> str:
    spans = sorted((edit.start or 0, len(text) if edit.end is None else edit.end, n, edit) for n, edit in group)
    pieces: list[str] = []
    position = 0
    for order, (start, end, number, edit) in enumerate(spans):
        if end > len(text) or start > end:
            raise _invalid(number, "end" if end > len(text) else "start", f"the text has {len(text)} characters")
        if order and start < position:
            raise _invalid(number, "start", f"overlaps edits[{spans[order - 1][2]}]")
        pieces += [text[position:start], edit.replacement]
        position = end
    return "".join([*pieces, text[position:]])


def with_part_text(message: Message, part: Part, call: int, text: str) -> dict[str, Any]:
    """A copy of ``message`` with one of its texts (see `part_text`) replaced."""
    edited = dict(message)
    if part is Part.REASONING:
        edited["reasoning_content"] = text
    elif part is Part.ARGUMENTS:
        calls = [dict(one) for one in edited["tool_calls"]]
        calls[call]["function"] = {**calls[call]["function"], "arguments": text}
        edited["tool_calls"] = calls
    elif isinstance(edited["content"], str):
        edited["content"] = text
    else:
        edited["content"] = _with_text_block(edited["content"], text)
    return edited


def _with_text_block(content: Sequence[Any], text: str) -> list[Any]:
    """Block content keeps its opaque blocks (images) in place; the text goes where the first text block was."""
    blocks: list[Any] = []
    placed = False
    for block in content:
        if not _is_text(block):
            blocks.append(block)
        elif not placed:
            blocks.append({**block, "text": text})
            placed = True
    return blocks
