"""Scripted agents: fixed lists of tool calls that solve a task in its real environment. Kept as ``scripts/*.toml``.

A script plays the part of a tool-calling model: it looks around, is wrong now and then, and repairs. The observations
are not part of it; they come from the environment each time.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline_evals.gym.tasks import check_tasks

_FOLDER = Path(__file__).parent / "scripts"


class ScriptError(ValueError):
    """A script file is missing or malformed."""


@dataclass(frozen=True)
class Step:
    """One assistant turn: what it says and the one tool it calls."""

    say: str
    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Script:
    """The scripted agent of one task."""

    task: str
    steps: tuple[Step, ...]

    def call_id(self, turn: int) -> str:
        """The tool call id of turn ``turn`` (from 0): opaque like a real one, but the same every time."""
        return "call_" + hashlib.sha256(f"{self.task}/{turn}".encode()).hexdigest()[:24]

    def assistant_message(self, turn: int) -> dict[str, Any]:
        """Turn ``turn`` (from 0) as the OpenAI message a model would have sent.

        Raises:
            IndexError: when the script has no such turn.
        """
        step = self.steps[turn]
        function = {"name": step.tool, "arguments": json.dumps(step.arguments, ensure_ascii=False)}
        return {
            "role": "assistant",
            "content": step.say,
            "tool_calls": [{"id": self.call_id(turn), "type": "function", "function": function}],
        }


def load_script(task: str) -> Script:
    """Read the script of ``task``.

    Raises:
        UnknownTaskError: for a task that does not exist or cannot run offline.
        ScriptError: when there is no script or it is malformed.
    """
    check_tasks([task])
    path = _FOLDER / f"{task}.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScriptError(f"no script for {task}") from error
    except tomllib.TOMLDecodeError as error:
        raise ScriptError(f"{path.name}: {error}") from error
    steps = tuple(_step(path.name, number, step) for number, step in enumerate(raw.get("steps", []), start=1))
    if not steps:
        raise ScriptError(f"{path.name}: no steps")
    return Script(task, steps)


def _step(name: str, number: int, raw: dict[str, Any]) -> Step:
    unknown = set(raw) - {"say", "tool", "arguments"}
    say, tool, arguments = raw.get("say"), raw.get("tool"), raw.get("arguments", {})
    if unknown or not (isinstance(say, str) and say and isinstance(tool, str) and isinstance(arguments, dict)):
        raise ScriptError(f"{name}: step {number} must have say, tool and (optionally) arguments, and nothing else")
    return Step(say.strip(), tool, arguments)
