"""Result files and folders, as what the page shows. Unknown files are refused, not skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyline_evals.common import EvalError, read_json
from leyline_evals.gym.results import read_runs
from leyline_evals.gym.summary import summarize
from leyline_evals.report.strips import blocks

KNOWN = {"leyline-replay": "replay", "leyline-mechanism": "mechanism", "leyline-fidelity": "fidelity"}
"""``kind`` of a result file -> the section of the page it goes to."""


def collect(paths: Sequence[Path]) -> dict[str, Any]:
    """The page's data: section -> list of results, in the order given.

    A file is a summary written by one of the commands; a folder is one of debug-gym runs, or holds such files and
    folders (one level).

    Raises:
        EvalError: a path is missing or is nothing the page can show.
    """
    sections: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        if not path.exists():
            raise EvalError(f"{path}: no such file or folder")
        for found in _expand(path):
            name, data = _read(found)
            sections.setdefault(name, []).append({"source": found.name, **data})
    if not sections:
        raise EvalError("nothing to show: no result file in " + ", ".join(map(str, paths)))
    return sections


def _expand(path: Path) -> list[Path]:
    if not path.is_dir() or _is_gym(path):
        return [path]
    found = [child for child in sorted(path.glob("*.json")) if _known(child)]
    # A folder beside a summary of the same name holds the runs the summary was made from.
    folders = [child for child in sorted(path.iterdir()) if child.is_dir() and not child.with_suffix(".json").exists()]
    return found + [child for child in folders if _is_gym(child)]


def _known(path: Path) -> bool:
    data = read_json(path)
    return data.get("kind") in KNOWN or _is_drift(data)


def _is_gym(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*/*.s*.jsonl"))


def _is_drift(data: Mapping[str, Any]) -> bool:
    return "drift" in data and "step" in data


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    if path.is_dir():
        summary = summarize(read_runs(path))
        return "gym", summary
    data = read_json(path)
    if _is_drift(data):
        return "drift", {"step": data["step"], "rows": data["drift"], "first_token": data.get("first_token", [])}
    section = KNOWN.get(str(data.get("kind")))
    if section is None:
        raise EvalError(f"{path}: not a result file of replay, mechanism, fidelity, drift or debug-gym")
    return section, _replay(data) if section == "replay" else data


def _replay(data: Mapping[str, Any]) -> dict[str, Any]:
    """The summary, with each turn reduced to what is drawn."""
    runs = [
        {"arm": run["arm"], "task": run["task"], "turns": [_turn(turn) for turn in run["turns"]]}
        for run in data["runs"]
    ]
    return {**data, "runs": runs}


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    receipt = turn["receipt"]
    return {
        "turn": turn["turn"],
        "tool": turn["tool"],
        "ttft": turn["ttft_ms"],
        "executed": receipt["executed"],
        "reason": receipt["reason"],
        "prompt": receipt["prompt_tokens"],
        "cached": receipt["cached_tokens"],
        "blocks": blocks(receipt),
    }
