"""Conversations of every shape OpenAI's messages can have, made from a source of random numbers."""

from __future__ import annotations

import json
from random import Random
from typing import Any

Message = dict[str, Any]
CORPUS_SIZE = 60

_FILES = ("src/app.py", "./src/app.py", "README.md", "tests/test_app.py", "données.csv")
_WORDS = (
    "alpha",
    "beta",
    "γάμμα",
    "return x",
    "def f():",
    "  indented",
    "",
    "{'a': 1}",
    "日本語のテキスト",
    "🙂",
    "0x1F",
)
_SECRETS = ("AKIA" + "ABCDEFGHIJKLMNOP", "sk-" + "a1B2c3D4e5F6g7H8i9J0k", "ghp_" + "x" * 36)
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def corpus(size: int = CORPUS_SIZE) -> list[list[Message]]:
    """The same ``size`` conversations every time."""
    return [conversation(Random(seed)) for seed in range(size)]


def requests(messages: list[Message]) -> list[list[Message]]:
    """What an agent sent to arrive at ``messages``: the history before each assistant message, and all of it."""
    cuts = [index for index, message in enumerate(messages) if index and message.get("role") == "assistant"]
    return [messages[:cut] for cut in (*cuts, len(messages))]


def conversation(random: Random) -> list[Message]:
    """One conversation: exchanges of a user message and turns with tool calls."""
    maker = _Maker(random)
    for _ in range(random.randint(1, 3)):
        maker.exchange()
    if random.random() < 0.15:
        maker.messages.append({"role": "assistant", "content": maker.text()})
    return maker.messages


class _Maker:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.messages: list[Message] = []
        self.reuse_ids = random.random() < 0.3
        self.number = 0
        if random.random() < 0.9:
            role = random.choice(("system", "developer"))
            self.messages.append({"role": role, "content": self.content(long=random.random() < 0.3)})

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def exchange(self) -> None:
        self.messages.append({"role": "user", "content": self.content()})
        if self.chance(0.15):
            self.messages.append({"role": "user", "content": self.text()})
        for _ in range(self.random.randint(0, 5)):
            self.turn()
            if self.chance(0.1):
                self.messages.append({"role": self.random.choice(("system", "developer")), "content": self.text()})
        if self.chance(0.5):
            self.messages.append(self.assistant())

    def turn(self) -> None:
        if self.chance(0.05):
            self.messages.append({"role": "assistant", "content": self.text()})
        if self.chance(0.05):
            self.old_style()
            return
        calls = [self.call(position) for position in range(self.random.choice((1, 1, 1, 2, 3)))]
        self.messages.append({**self.assistant(), "tool_calls": calls})
        if self.chance(0.6):
            self.messages[-1]["content"] = None
        answered = [call for call in calls if not self.chance(0.05)]
        self.random.shuffle(answered)
        for call in answered:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.result()})
        if self.chance(0.03):
            self.messages.append({"role": "tool", "tool_call_id": "nobody", "content": self.text()})

    def old_style(self) -> None:
        call = {"name": "read_file", "arguments": json.dumps({"path": self.random.choice(_FILES)})}
        self.messages.append({"role": "assistant", "content": None, "function_call": call})
        self.messages.append({"role": "function", "name": "read_file", "content": self.result()})

    def call(self, position: int) -> Message:
        self.number += 1
        id = f"call_{position}" if self.reuse_ids else f"call_{self.number}"
        if self.chance(0.05):
            return {"id": id, "type": "custom", "custom": {"name": "shell", "input": self.text()}}
        name, arguments = self.tool()
        text = "not json" if self.chance(0.03) else json.dumps(arguments)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}

    def tool(self) -> tuple[str, dict[str, Any]]:
        path = self.random.choice(_FILES)
        return self.random.choice(
            (
                ("read_file", {"path": path}),
                ("read_file", {"path": path}),
                ("read_file", {"path": path, "start": 1, "end": 20}),
                ("edit_file", {"path": path, "text": self.text()}),
                ("editor", {"command": "view", "path": path}),
                ("editor", {"command": "str_replace", "path": path, "old": "a", "new": self.text()}),
                ("run_tests", {}),
                ("bash", {"command": self.random.choice(("pytest -q", "ls", "env " + self.secret()))}),
            )
        )

    def assistant(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content()}
        if self.chance(0.4):
            message["reasoning_content"] = self.text()
        if self.chance(0.1):
            message["content"] = f"<think>{self.text()}</think>{self.random.choice(('', self.text()))}"
        return message

    def result(self) -> Any:
        kind = self.random.random()
        if kind < 0.1:
            return "Error: " + self.text()
        if kind < 0.15:
            return ""
        if kind < 0.3:
            return "".join(f"same line {line}\n" for line in range(self.random.choice((3, 40, 200))))
        return self.content(long=self.chance(0.5))

    def content(self, long: bool = False) -> Any:
        text = self.text(long)
        if self.chance(0.08):
            text += f" <ephemeral_observation>{self.text()}</ephemeral_observation>"
        if self.chance(0.05):
            text += f" key {self.secret()} end"
        kind = self.random.random()
        if kind < 0.7:
            return text
        if kind < 0.85:
            return [{"type": "text", "text": text}]
        if kind < 0.93:
            return [{"type": "text", "text": text}, dict(_IMAGE), {"type": "text", "text": self.text()}]
        return [dict(_IMAGE), {"type": "text", "text": text}]

    def secret(self) -> str:
        return self.random.choice(_SECRETS)

    def text(self, long: bool = False) -> str:
        words = [
            self.random.choice(_WORDS)
            for _ in range(self.random.randint(60, 150) if long else self.random.randint(1, 12))
        ]
        return self.random.choice((" ", "\n")).join(words) or "x"
