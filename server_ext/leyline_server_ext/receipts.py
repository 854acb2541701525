"""From a plan, the scheduler's report and the engine's counts to the receipt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leyline_client._models import Executed, Mode, PoolUse, Reason, Receipt, Segment

from .lineage import Lineage
from .plan import Plan


@dataclass(slots=True)
class Outcome:
    """What came back for one turn.

    Attributes:
        cached: prompt tokens found cached by the request itself (replacements prefilled before it among them).
        warmed: prompt tokens computed by the internal prefills of replacements.
        report: the scheduler's report, empty if none came (an aborted request).
        output_ids: generated tokens.
        first_token_ms: the engine's own time for a reply of at most one token, milliseconds; None for longer ones.
    """

    cached: int = 0
    warmed: int = 0
    report: dict[str, Any] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    first_token_ms: float | None = None


def build_receipt(plan: Plan, outcome: Outcome, *, drift: int = 0, reason: Reason | None = None) -> Receipt:
    """The receipt of a finished turn. ``reason`` is what the route itself has to say; the scheduler's goes first."""
    report = outcome.report
    prompt = len(plan.target)
    prefilled = min(prompt, prompt - outcome.cached + outcome.warmed)
    segments = tuple(
        Segment(start=max(start, run.start), end=min(end, run.end), delta=delta, generation=generation)
        for start, end, delta, generation in report.get("segments", ())
        # On a page grid the graft also moves page neighbours of the kept runs; those are prefix or replacement.
        for run in plan.runs
        if max(start, run.start) < min(end, run.end)
    )
    executed, reason = _executed(plan, report, reason)
    lineage = actual_lineage(plan, report)
    return Receipt(
        requested=requested(plan),
        executed=executed,
        reason=reason,
        prompt_tokens=prompt,
        cached_tokens=prompt - prefilled,
        rotated_tokens=sum(segment.end - segment.start for segment in segments if segment.delta),
        prefilled_tokens=prefilled,
        replacement_tokens=min(outcome.warmed, prefilled),
        influenced_tokens=0 if lineage.first is None else max(0, prompt - lineage.first),
        drift_tokens=drift,
        dropped_tokens=report.get("dropped", 0),
        kept_by_others=report.get("kept", 0),
        slots_allocated=report.get("allocated", 0),
        slots_released=report.get("released", 0),
        generation=max((segment.generation for segment in segments), default=0),
        segments=segments,
        directives=plan.directives,
        graft_ms=round(float(report.get("graft_ms", 0.0)), 3),
        pool_before=_pool(report.get("pool_before")),
        pool_after=_pool(report.get("pool_after")),
    )


def drop_receipt(outcome: Outcome) -> Receipt:
    """The receipt of a purge or an end that carried no prompt: forget's certificate alone."""
    report = outcome.report
    return Receipt(
        dropped_tokens=report.get("dropped", 0),
        kept_by_others=report.get("kept", 0),
        pool_before=_pool(report.get("pool_before")),
        pool_after=_pool(report.get("pool_after")),
    )


def requested(plan: Plan) -> Mode | str:
    """The mode asked for: one, ``"mixed"`` or ``"none"``."""
    modes = {directive.mode for directive in plan.directives}
    if not modes:
        return "none"
    return modes.pop() if len(modes) == 1 else "mixed"


def actual_lineage(plan: Plan, report: dict[str, Any]) -> Lineage:
    """The lineage of what is really cached: the scheduler's word, where it gave one."""
    if "lineage" not in report:
        return plan.lineage
    return Lineage(tuple((int(p), int(s)) for p, s in report["lineage"]), int(report["until"]))


def _executed(plan: Plan, report: dict[str, Any], reason: Reason | None) -> tuple[Executed, Reason | None]:
    if not plan.directives:
        return Executed.APPEND, reason
    wanted_splice = any(directive.mode is Mode.AMORTIZE for directive in plan.directives)
    if not wanted_splice:
        return Executed.FORGET, reason
    fault = report.get("reason")
    if fault is not None:
        return Executed.REPREFILL, Reason(fault)
    if plan.runs and not plan.rotates:
        # Text is kept after the edit, but less than a page of it, or nothing but the token the engine always computes.
        return Executed.REPREFILL, reason or Reason.TAIL_TOO_SHORT
    return (Executed.AMORTIZE if plan.forget_from is None else Executed.MIXED), reason


def _pool(counts: Any) -> PoolUse | None:
    if counts is None:
        return None
    total, free, cached = counts
    return PoolUse(total=total, free=free, cached=cached, held=max(0, total - free - cached))
