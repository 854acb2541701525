"""Measure how far amortize's answers are from those of the full context and of a re-prefill; write a fidelity card.

A server started with ``LEYLINE_FIDELITY_CARD=fidelity.json`` shows the card in ``/leyline/v1/info``.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leyline_client import LeylineError, TransportError
from leyline_evals import served
from leyline_evals.common import EvalError, ServerDown, provenance, server_facts, server_info
from leyline_evals.fidelity.card import Outcome, card, table
from leyline_evals.fidelity.cases import Case, constructed, natural_set
from leyline_evals.fidelity.probe import ARMS, Probe
from leyline_evals.fidelity.prompts import build
from leyline_evals.fidelity.store import Store
from leyline_evals.gym.recording import load_recording, recorded_tasks
from leyline_evals.machine import write_json

SUMMARY = "how close amortize's answers are; writes fidelity.json"
TRIES = 6
"""Made-up cases looked at for each that is wanted, at most."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured: constructed cases per (distance, number of edits), and natural cases in all."""

    per_cell: int = 8
    distances: tuple[int, ...] = (250, 1000, 3000)
    edits: tuple[int, ...] = (1, 4)
    natural: int = 16
    natural_chars: int = 6000

    def made_up(self) -> Iterator[Iterator[Case]]:
        """The candidates of every cell, in order."""
        for deleted, distance, edits in itertools.product((False, True), self.distances, self.edits):
            seeds = range(TRIES * self.per_cell)
            yield (constructed(seed, distance, edits, deleted=deleted) for seed in seeds)


def measure(
    base_url: str,
    sizes: Sizes | None = None,
    arms: Sequence[str] = ARMS,
    progress: Callable[[str], None] = print,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Measure the model served at ``base_url`` and return its card.

    Cases found in ``keep`` (see `Store`) are not measured again; new ones are added to it.

    Raises:
        ServerDown: the server cannot be reached or ends; what was measured is kept.
        EvalError: the server cannot be measured, or no case could be built.
    """
    sizes = sizes or Sizes()
    info = server_info(base_url)
    facts = server_facts(base_url, info)
    store = Store(keep, {**facts, "arms": list(arms), "sglang": info.sglang_version})
    if len(store):
        progress(f"{len(store)} cases are measured already")
    probe = Probe(base_url)
    try:
        outcomes, tried = _all(_Bench(probe, arms, store), sizes, progress)
    except TransportError as error:
        raise ServerDown(f"no answer from {base_url}: {error}") from error
    except LeylineError as error:
        raise EvalError(str(error)) from error
    finally:
        probe.close()
    if not outcomes:
        raise EvalError("the references agreed in every case: nothing to compare")
    return card({**facts, **provenance(info)}, outcomes, tried)


def _all(bench: _Bench, sizes: Sizes, progress: Callable[[str], None]) -> tuple[list[Outcome], dict[str, int]]:
    outcomes: list[Outcome] = []
    tried: dict[str, int] = {}
    for cell in sizes.made_up():
        found = 0
        for case in cell:
            tried[case.kind] = tried.get(case.kind, 0) + 1
            outcome = bench.outcome(case)
            if outcome.counts:
                outcomes.append(outcome)
                found += 1
            if found == sizes.per_cell:
                break
        progress(f"{case.kind}, {case.distance} characters, {len(case.edits)} edits: {found} cases")
    for case in _natural(sizes):
        tried["natural"] = tried.get("natural", 0) + 1
        outcomes.append(bench.outcome(case))
        progress(f"natural: {case.name}")
    return outcomes, tried


@dataclass(frozen=True)
class _Bench:
    probe: Probe
    arms: Sequence[str]
    store: Store

    def outcome(self, case: Case) -> Outcome:
        """The case measured, or found; the arms only where it counts."""
        known = self.store.find(case)
        if known is not None:
            return known
        prompt = build(self.probe.client, case)
        full = self.probe.reference([*prompt.source, *prompt.tail])
        reprefill = self.probe.reference([*prompt.edited, *prompt.tail])
        outcome = Outcome(case.name, case.kind, prompt.distance, case.distance, len(case.edits), full, reprefill, {})
        if outcome.counts:
            outcome = replace(outcome, arms={arm: self.probe.arm(prompt, arm).distribution for arm in self.arms})
        self.store.add(outcome)
        return outcome


def _natural(sizes: Sizes) -> list[Case]:
    recordings = [load_recording(task) for task in recorded_tasks()]
    return natural_set(recordings, sizes.natural_chars, sizes.natural)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    served.add_arguments(parser)
    sizes = Sizes()
    parser.add_argument("--per-cell", type=int, default=sizes.per_cell, metavar="N", help="constructed cases for each "
                        "distance and number of edits (%(default)s)")  # fmt: skip
    parser.add_argument("--distances", type=int, nargs="+", default=list(sizes.distances), metavar="CHARACTERS",
                        help="between the last edit and the question (%(default)s)")  # fmt: skip
    parser.add_argument("--edits", type=int, nargs="+", default=list(sizes.edits), metavar="N",
                        help="edits per case (%(default)s)")  # fmt: skip
    parser.add_argument("--natural", type=int, default=sizes.natural, metavar="N", help="natural cases (%(default)s)")
    parser.add_argument("--natural-chars", type=int, default=sizes.natural_chars, metavar="CHARACTERS",
                        help="longest natural conversation (%(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out/fidelity.json"), help="the card (%(default)s); what is "
                        "measured lies beside it as .jsonl until it is complete")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="measure again what an interrupted run has measured")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command."""
    numbers = [arguments.per_cell, *arguments.distances, *arguments.edits, arguments.natural_chars]
    if min(numbers) < 1 or arguments.natural < 0:
        raise EvalError("sizes must be at least 1 (--natural at least 0)")
    sizes = Sizes(
        arguments.per_cell,
        tuple(arguments.distances),
        tuple(arguments.edits),
        arguments.natural,
        arguments.natural_chars,
    )
    keep: Path = arguments.out.with_suffix(".jsonl")
    if arguments.fresh:
        keep.unlink(missing_ok=True)
    with served.served(arguments, _say) as server:
        found = measure(server.base_url, sizes, progress=_say, keep=keep)
    write_json(arguments.out, found)
    keep.unlink()
    print(table(found))
    _say(str(arguments.out))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
