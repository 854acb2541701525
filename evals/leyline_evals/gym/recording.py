"""Recorded trajectories: what a scripted agent did and what the environment answered. Needs no debug-gym.

One JSON Lines file per task: a header line, then one line per turn. The OpenAI ``messages`` of any turn can be
rebuilt exactly from it::

    for turn in load_recording("config").turns():
        client.chat.completions.create(model=..., messages=turn.messages, tools=recording.tools)
        # the script's action is turn.action, the environment's answer turn.result

Line shapes:

- ``{"kind": "header", "format": 1, "task", "debug_gym", "python", "recorded" (date), "resolved", "score",
  "max_score", "turns", "messages" (system and user), "tools" (OpenAI tool schemas)}``
- ``{"kind": "turn", "turn" (from 0), "assistant" (message with one tool call), "tool" (message), "score"}``
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

FORMAT = 1
_FOLDER = Path(__file__).parent.parent / "recordings"
_HEADER_FIELDS = ("task", "debug_gym", "python", "recorded", "resolved", "score", "max_score", "messages", "tools")


class RecordingError(ValueError):
    """A recording is missing, truncated or malformed."""


@dataclass(frozen=True)
class RecordedTurn:
    """One turn as stored: the assistant's message, the tool's message and the score after it."""

    assistant: Message
    tool: Message
    score: int


@dataclass(frozen=True)
class Turn:
    """One request of a replay.

    ``messages`` is the whole prompt of this turn (a copy the caller may change), ``action`` the assistant message to
    append to it and ``result`` the tool message after that.
    """

    index: int
    messages: list[Message]
    action: Message
    result: Message


@dataclass(frozen=True)
class Recording:
    """A trajectory that solved ``task``. ``score`` and ``max_score`` count passed and collected tests."""

    task: str
    debug_gym: str
    python: str
    recorded: str
    resolved: bool
    score: int
    max_score: int
    messages: list[Message]
    tools: list[dict[str, Any]]
    steps: tuple[RecordedTurn, ...]

    def turns(self) -> Iterator[Turn]:
        """Yield the requests in order; the last one's ``messages`` plus action and result is the full transcript."""
        history = copy.deepcopy(self.messages)
        for index, step in enumerate(self.steps):
            yield Turn(index, copy.deepcopy(history), copy.deepcopy(step.assistant), copy.deepcopy(step.tool))
            history += [copy.deepcopy(step.assistant), copy.deepcopy(step.tool)]

    def transcript(self) -> list[Message]:
        """All messages, up to the last tool result."""
        return copy.deepcopy([*self.messages, *(m for step in self.steps for m in (step.assistant, step.tool))])

    def to_jsonl(self) -> str:
        """The file's text; the same recording always gives the same bytes."""
        header: dict[str, Any] = {"kind": "header", "format": FORMAT, "turns": len(self.steps)}
        header.update({name: getattr(self, name) for name in _HEADER_FIELDS})
        lines: list[dict[str, Any]] = [header]
        for index, step in enumerate(self.steps):
            turn = {"kind": "turn", "turn": index, "assistant": step.assistant, "tool": step.tool, "score": step.score}
            lines.append(turn)
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def recorded_tasks() -> tuple[str, ...]:
    """Tasks that have a recording in this package, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.jsonl")))


def recording_path(task: str) -> Path:
    """Where the recording of ``task`` lies in this package."""
    return _FOLDER / f"{task}.jsonl"


def load_recording(task: str) -> Recording:
    """Load the recording of ``task`` that ships with this package.

    Raises:
        RecordingError: when there is none (the message names those there are) or it is malformed.
    """
    if task not in recorded_tasks():
        raise RecordingError(f"no recording of {task!r}; there are {', '.join(recorded_tasks()) or 'none'}")
    return parse_recording(recording_path(task).read_text(encoding="utf-8"))


def parse_recording(text: str) -> Recording:
    """Parse a recording's text.

    Raises:
        RecordingError: naming the line that is wrong.
    """
    lines = [_line(number, line) for number, line in enumerate(text.splitlines(), start=1)]
    if not lines or lines[0].get("kind") != "header":
        raise RecordingError("line 1: a header line is expected")
    header = lines[0]
    missing = [name for name in (*_HEADER_FIELDS, "turns") if name not in header]
    if missing or header.get("format") != FORMAT:
        raise RecordingError(f"line 1: format {FORMAT} is expected; missing: {', '.join(missing) or 'nothing'}")
    if len(lines) - 1 != header["turns"]:
        raise RecordingError(f"{header['turns']} turns were recorded, {len(lines) - 1} are there")
    steps = tuple(_turn(index, line) for index, line in enumerate(lines[1:]))
    return Recording(steps=steps, **{name: header[name] for name in _HEADER_FIELDS})


def _line(number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordingError(f"line {number}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RecordingError(f"line {number}: an object is expected")
    return value


def _turn(index: int, line: dict[str, Any]) -> RecordedTurn:
    try:
        assistant, tool = line["assistant"], line["tool"]
        paired = assistant["tool_calls"][0]["id"] == tool["tool_call_id"] and len(assistant["tool_calls"]) == 1
        if line["kind"] != "turn" or line["turn"] != index or not paired:
            raise RecordingError(f"line {index + 2}: turn {index} with one paired tool call is expected")
        return RecordedTurn(assistant, tool, line["score"])
    except (KeyError, TypeError, IndexError) as error:
        raise RecordingError(f"line {index + 2}: incomplete turn ({error!r})") from error
