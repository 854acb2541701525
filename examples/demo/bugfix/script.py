"""The scripted part of the demo: which tool is called in which turn, and with what."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

TRAJECTORY = Path(__file__).parent.parent / "trajectory.toml"


@dataclass(frozen=True, slots=True)
class Step:
    """One turn's action; without a tool the agent is done."""

    tool: str | None = None
    arguments: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.tool or 'report'} {self.arguments.get('path', '')}".strip()


def read_script(path: Path = TRAJECTORY) -> list[Step]:
    """The steps of a trajectory file."""
    turns = tomllib.loads(path.read_text(encoding="utf-8"))["turn"]
    return [Step(turn.pop("tool", None), turn) for turn in turns]
