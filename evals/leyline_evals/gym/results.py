"""The files of an experiment: one JSON Lines file per run, ``<out>/<arm>/<task>.s<seed>.jsonl``.

First line ``{"kind": "run", "arm", "task", "seed", "settings"}``, then one ``{"kind": "step", ...}`` per turn, and at
the end the marker ``{"kind": "done", "resolved", "score", "max_score", "turns", "ended", "seconds", ...}`` or
``{"kind": "failed", "error"}``. A file without the marker is a run that was cut off; it is run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class SettingsChangedError(ValueError):
    """The output folder holds runs made with other settings, which cannot be mixed with these."""


@dataclass(frozen=True)
class RunKey:
    """Which run: an arm on a task with a seed."""

    arm: str
    task: str
    seed: int

    def path(self, out: Path) -> Path:
        """Where this run's file lies under ``out``."""
        return out / self.arm / f"{self.task}.s{self.seed}.jsonl"

    def __str__(self) -> str:
        return f"{self.arm} {self.task} s{self.seed}"


@dataclass(frozen=True)
class RunResult:
    """A run as read back. ``end`` is the marker line, None while there is none."""

    key: RunKey
    settings: dict[str, Any]
    steps: tuple[dict[str, Any], ...] = ()
    end: dict[str, Any] | None = field(default=None)

    @property
    def done(self) -> bool:
        """Whether the run came to an end of its own (solved or not) and need not be repeated."""
        return self.end is not None and self.end["kind"] == "done"

    @property
    def resolved(self) -> bool:
        """debug-gym's own verdict; False for a run that did not end."""
        return self.done and bool(self.end and self.end["resolved"])


class RunFile:
    """The file of a run in progress; its marker reaches the disk before :meth:`finish` returns."""

    def __init__(self, out: Path, key: RunKey, settings: dict[str, Any]) -> None:
        path = key.path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._write({"kind": "run", "arm": key.arm, "task": key.task, "seed": key.seed, "settings": settings})

    def step(self, step: dict[str, Any]) -> None:
        """Add a turn."""
        self._write({"kind": "step", **step})

    def finish(self, kind: str, end: dict[str, Any]) -> None:
        """Write the marker, ``done`` or ``failed``, and close."""
        self._write({"kind": kind, **end})
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close without a marker: the run was cut off."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_run(path: Path) -> RunResult | None:
    """Read a run's file; None when not even its first line is whole. A torn last line is ignored."""
    lines = list(_whole_lines(path))
    if not lines or lines[0].get("kind") != "run":
        return None
    head = lines[0]
    end = lines[-1] if lines[-1]["kind"] in ("done", "failed") else None
    return RunResult(
        key=RunKey(head["arm"], head["task"], head["seed"]),
        settings=head["settings"],
        steps=tuple(line for line in lines if line["kind"] == "step"),
        end=end,
    )


def read_runs(out: Path) -> list[RunResult]:
    """All runs under ``out``, ordered by arm, task and seed."""
    runs = [read_run(path) for path in out.glob("*/*.jsonl") if not path.name.endswith(".transcript.jsonl")]
    return sorted((run for run in runs if run), key=lambda run: (run.key.arm, run.key.task, run.key.seed))


def finished_keys(out: Path, settings: dict[str, Any]) -> set[RunKey]:
    """Runs under ``out`` that need not be repeated.

    Raises:
        SettingsChangedError: when any of them was made with settings other than ``settings``.
    """
    done = [run for run in read_runs(out) if run.done]
    wanted = json.loads(json.dumps(settings))
    for run in done:
        if run.settings != wanted:
            names = sorted(set(run.settings) | set(wanted))
            changed = [name for name in names if run.settings.get(name) != wanted.get(name)]
            raise SettingsChangedError(
                f"{out} holds a finished run ({run.key}) made with other settings: {', '.join(changed)} differ; "
                "use another folder or the same settings"
            )
    return {run.key for run in done}


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            return
        if not isinstance(line, dict) or "kind" not in line:
            return
        yield line
