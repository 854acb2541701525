"""One arm of the demo: an ordinary agent loop around a `LeylineSession`. Only its actions are scripted."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bugfix.script import Step
from bugfix.workspace import TOOLS, Workspace
from leyline_client import LeylineSession, leyline_of

ARMS: dict[str, dict[str, Any]] = {
    "keep-all": {},
    "forget": {"mode": "forget"},
    "amortize": {"mode": "amortize"},
}
"""What sets the arms apart, as arguments of `LeylineSession`; the two that edit get the policies as well."""

SYSTEM = (
    "You are a careful Python programmer. You work in small steps: look at the project, run its tests, read what "
    "matters, change one thing, and run the tests again. Before each step say in one sentence what you do and why."
)
TASK = "The test suite of this project fails. Find the bugs and fix them in the program, not in the tests."
MAX_NEW_TOKENS = 28


@dataclass(frozen=True, slots=True)
class Row:
    """What one turn of one arm came to. Counts are prompt tokens unless the name says otherwise."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    rotated_tokens: int
    prefilled_tokens: int
    edits: int
    """Edits the policies issued in this turn."""
    ttft_ms: float
    """From the call of ``create`` to the first generated text, policies and HTTP included."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Agent:
    """Keeps its full history, asks the model for its words, and carries out the script's action."""

    def __init__(self, session: LeylineSession, workspace: Workspace, *, max_new_tokens: int = MAX_NEW_TOKENS) -> None:
        self.session, self.workspace = session, workspace
        self.history: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": TASK},
        ]
        self.rows: list[Row] = []
        self._max_new_tokens = max_new_tokens

    @property
    def said(self) -> str:
        """What the model said last."""
        return next(message["content"] for message in reversed(self.history) if message["role"] == "assistant")

    def take_turn(self, step: Step) -> Row:
        """One turn: the model speaks, the scripted action is attached to what it said, its tool runs."""
        edits = self.session.stats.edits
        text, ttft, receipt = self._speak()
        message: dict[str, Any] = {"role": "assistant", "content": text}
        self.history.append(message)
        if step.tool is not None:
            call = {"name": step.tool, "arguments": json.dumps(step.arguments)}
            name = f"call_{len(self.rows) + 1}"
            message["tool_calls"] = [{"id": name, "type": "function", "function": call}]
            answer = self.workspace.call(step.tool, step.arguments)
            self.history.append({"role": "tool", "tool_call_id": name, "content": answer})
        row = Row(
            turn=len(self.rows) + 1,
            prompt_tokens=receipt.prompt_tokens,
            cached_tokens=receipt.cached_tokens,
            rotated_tokens=receipt.rotated_tokens,
            prefilled_tokens=receipt.prefilled_tokens,
            edits=self.session.stats.edits - edits,
            ttft_ms=round(ttft, 1),
        )
        self.rows.append(row)
        return row

    def _speak(self) -> tuple[str, float, Any]:
        began = time.perf_counter()
        stream = self.session.chat.completions.create(
            model="default",
            messages=self.history,
            tools=TOOLS,
            max_tokens=self._max_new_tokens,
            temperature=0.8,
            stop=["\n"],
            stream=True,
        )
        parts: list[str] = []
        first = 0.0
        for chunk in stream:
            first = first or time.perf_counter()
            if chunk.choices and chunk.choices[0].delta.content:
                parts.append(chunk.choices[0].delta.content)
        return "".join(parts), 1e3 * (first - began), leyline_of(stream).receipt


def open_session(arm: str, base_url: str, policies: Sequence[str], salt: str, **extra: Any) -> LeylineSession:
    """The session of an arm. Its cache salt keeps arms, and earlier runs, from warming each other's cache."""
    editing = {} if arm == "keep-all" else {"policies": policies}
    return LeylineSession(base_url, cache_salt=f"{salt}-{arm}", **ARMS[arm], **editing, **extra)
