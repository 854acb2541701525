"""Measured cases in a file, one line each, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leyline_evals.common import EvalError
from leyline_evals.fidelity.card import Outcome
from leyline_evals.fidelity.cases import Case
from leyline_evals.fidelity.compare import Distribution


class Store:
    """The outcomes in ``path``, whose first line says what they were measured on.

    Args:
        path: a JSON lines file; made with its folder. None keeps nothing.
        settings: JSON-ready; what must not differ within one card.

    Raises:
        EvalError: the file holds cases of other settings, or is no such file.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._known: dict[tuple[str, str, int, int], Outcome] = {}
        if path is None:
            return
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings, sort_keys=True) + "\n", encoding="utf-8")
            return
        # The last line may have been cut off: it is measured again.
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        try:
            head, *found = map(json.loads, lines)
            if head != json.loads(json.dumps(settings)):
                raise EvalError(f"{path} holds cases of another server or other arms: choose another --out, or --fresh")
            for fields in found:
                outcome = _read(fields)
                self._known[_key(outcome)] = outcome
        except (ValueError, KeyError, TypeError) as error:
            raise EvalError(f"{path} is damaged ({type(error).__name__}): remove it, or --fresh") from error
        path.write_text("".join(lines), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._known)

    def find(self, case: Case) -> Outcome | None:
        """What is known of a case."""
        return self._known.get((case.kind, case.name, case.distance, len(case.edits)))

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome, at once."""
        self._known[_key(outcome)] = outcome
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")


def _key(outcome: Outcome) -> tuple[str, str, int, int]:
    return outcome.kind, outcome.name, outcome.bucket, outcome.edits


def _read(fields: dict[str, Any]) -> Outcome:
    arms = {arm: _distribution(found) for arm, found in fields["arms"].items()}
    known = {name: _distribution(fields[name]) for name in ("full", "reprefill")}
    return Outcome(**{**fields, **known, "arms": arms})


def _distribution(fields: Mapping[str, Any]) -> Distribution:
    # JSON has strings for keys.
    return Distribution({int(token): float(value) for token, value in fields["logprobs"].items()})
