"""A small agent loop for tests: it keeps its full history, as agents do."""

from __future__ import annotations

from typing import Any

from leyline_client import Edit, Mode, Part
from leyline_client.testing import tool_call

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "List the files, then read the longest one of them."}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]


def turn(number: int, words: int = 40) -> list[dict[str, Any]]:
    """An assistant's tool call and its result."""
    return [
        {"role": "assistant", "content": None, "tool_calls": [tool_call("read", {"n": number}, f"c{number}")]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"output {number} " + "word " * words},
    ]


def history(turns: int, words: int = 40) -> list[dict[str, Any]]:
    """A conversation after ``turns`` tool calls and a first one."""
    return [SYSTEM, USER, *(message for number in range(turns + 1) for message in turn(number, words))]


class ClearFirst:
    """Clears the first tool result as soon as there are three."""

    name = "clear-first"

    def __init__(self, mode: Mode = Mode.AMORTIZE) -> None:
        self.mode = mode

    def plan(self, transcript: Any) -> list[Edit]:
        results = [m for m in transcript.messages if m.role == "tool"]
        return [Edit(message=results[0].index, replacement="[cleared]", mode=self.mode)] if len(results) > 2 else []


class RemoveFirst:
    """Removes the first tool exchange as soon as there are four."""

    name = "remove-first"
    removes_messages = True

    def plan(self, transcript: Any) -> list[Edit]:
        results = [m for m in transcript.messages if m.role == "tool"]
        index = results[0].index if len(results) > 3 else 0
        return [Edit(message=i, part=Part.MESSAGE) for i in (index - 1, index)] if index else []
