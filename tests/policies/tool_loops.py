"""Conversations that grow turn by turn, and the loop that runs a policy set over them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline_client._edits import apply_edits
from leyline_client.policy import Edit, PolicySet

Message = dict[str, Any]

START: list[Message] = [
    {"role": "system", "content": "You repair programs."},
    {"role": "user", "content": "Make the tests pass."},
]


def call(id: str, name: str, **arguments: Any) -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def turn(calls: Sequence[Message], results: Sequence[str], **fields: Any) -> list[Message]:
    """An assistant message with calls, and their results in order."""
    answered = [
        {"role": "tool", "tool_call_id": one["id"], "content": result}
        for one, result in zip(calls, results, strict=True)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": list(calls), **fields}, *answered]


def text(seed: str, characters: int) -> str:
    """Lines that differ, about so many characters."""
    line = f"{seed} line of output number "
    return "".join(f"{line}{number}\n" for number in range(max(1, characters // (len(line) + 4))))


@dataclass
class Run:
    """A conversation under policies, with what stood after each turn."""

    policies: PolicySet
    messages: list[Message] = field(default_factory=lambda: list(START))
    standing: list[Edit] = field(default_factory=list)
    attention: bool = True

    def send(self) -> list[Edit]:
        """One request. Returns the new edits."""
        attention = [[0.0] * 16] * len(self.messages) if self.attention else None
        new = self.policies.plan(self.messages, standing=self.standing, attention=attention)
        self.standing += new
        return new

    @property
    def sent(self) -> list[Message]:
        """What the server renders."""
        return apply_edits(self.messages, self.standing)

    @property
    def tokens(self) -> int:
        return self.policies.transcript(self.messages, standing=self.standing).tokens


def reading(
    turns: int, characters: int = 1_500, ids: str = "call_{}", files: int | None = None
) -> Iterator[list[Message]]:
    """Turns that read a file each: a different one, or one of ``files`` in turn."""
    for number in range(turns):
        file = number % (files or turns)
        one = call(ids.format(number), "read_file", path=f"src/file_{file}.py")
        yield turn([one], [text(f"file {file}", characters)], reasoning_content="Let me look.")
