"""What replayed runs come to: totals per arm, the checks, and the per-turn data the report draws."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from leyline_evals.gym.results import RunResult
from leyline_evals.stats import quantile

BASELINE = "keep-all"
PREFILL_SLACK = 1.05
"""Amortize may prefill this many times what keep-all and its own replacements come to."""

TOKEN_COLUMNS = ("prompt_tokens", "cached_tokens", "rotated_tokens", "prefilled_tokens", "replacement_tokens")
_COUNTS = (*TOKEN_COLUMNS, "drift_tokens", "dropped_tokens")

Step = Mapping[str, Any]


def summarize(results: Sequence[RunResult], arms: Sequence[str]) -> dict[str, Any]:
    """A JSON-ready summary.

    Arms are compared over the tasks that *every* arm finished (``tasks``); the others are named in ``failed`` and
    counted nowhere. ``token_columns`` is a digest of every token count of every turn: equal digests, equal counts.
    """
    by_case = {(result.key.arm, result.key.task): result for result in results}
    named = list(dict.fromkeys(result.key.task for result in results))
    tasks = [task for task in named if all((r := by_case.get((arm, task))) and r.done for arm in arms)]
    runs = {arm: [by_case[arm, task] for task in tasks] for arm in arms}
    figures = {arm: _arm([step for run in chosen for step in run.steps]) for arm, chosen in runs.items()}
    for arm in arms:
        figures[arm] |= _measured_saving(arm, figures)
    return {
        "tasks": [_task(task, runs[arms[0]][index]) for index, task in enumerate(tasks)],
        "failed": [_failure(result) for result in results if not result.done],
        "arms": figures,
        "checks": list(_checks(figures)),
        "token_columns": _digest(runs),
        "runs": [_run(run) for chosen in runs.values() for run in chosen],
    }


def reprefill_avoided(step: Step) -> int:
    """Tokens that prefilling the same edited prompt from its first changed position would have computed on top.

    A re-prefill reuses what lies before the first edit; everything a splice reuses after it is avoided. Only the first
    edit's start matters, and before it source and target coordinates are the same.
    """
    receipt = step["leyline"]["receipt"]
    if receipt["executed"] not in ("amortize", "mixed"):
        return 0
    first = min((d["start"] for d in receipt["directives"]), default=receipt["cached_tokens"])
    return max(0, int(receipt["cached_tokens"]) - int(first))


def _arm(steps: Sequence[Step]) -> dict[str, Any]:
    totals = {name: sum(int(step["leyline"]["receipt"][name]) for step in steps) for name in _COUNTS}
    edited = [step for step in steps if step["leyline"]["receipt"]["directives"]]
    reasons = [step["leyline"]["receipt"]["reason"] for step in steps]
    return {
        "requests": len(steps),
        **totals,
        "hit_rate": totals["cached_tokens"] / totals["prompt_tokens"] if totals["prompt_tokens"] else None,
        "reprefill_avoided_tokens": sum(map(reprefill_avoided, steps)),
        "ttft_ms": _quantiles(steps),
        # The first request of a run is a cold prefill of the same tokens in every arm.
        "ttft_after_first_ms": _quantiles(step for step in steps if step["turn"] > 0),
        "ttft_edited_turns_ms": _quantiles(edited),
        "edited_turns": len(edited),
        "reasons": {reason: reasons.count(reason) for reason in sorted({r for r in reasons if r})},
    }


def _quantiles(steps: Iterable[Step]) -> dict[str, float] | None:
    times = sorted(step["ttft_ms"] for step in steps if step["ttft_ms"] is not None)
    return {"p50": quantile(times, 0.5), "p95": quantile(times, 0.95), "count": len(times)} if times else None


def _measured_saving(arm: str, figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Against the arm that makes the same edits and re-prefills, where it was run."""
    policies, plus, mode = arm.rpartition("+")
    other = f"{policies}+forget"
    if not plus or mode != "amortize" or other not in figures:
        return {}
    return {"prefilled_less_than": {other: figures[other]["prefilled_tokens"] - figures[arm]["prefilled_tokens"]}}


def _checks(figures: Mapping[str, Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """What must hold of every amortize arm beside keep-all."""
    base = figures.get(BASELINE)
    for arm, mine in figures.items():
        if base is None or not arm.endswith("+amortize") or not mine["requests"]:
            continue
        allowed = PREFILL_SLACK * (base["prefilled_tokens"] + mine["replacement_tokens"])
        yield {
            "arm": arm,
            "name": "prefilled <= 1.05 x (keep-all's prefilled + replacements)",
            "found": mine["prefilled_tokens"],
            "bound": round(allowed, 1),
            "holds": mine["prefilled_tokens"] <= allowed,
        }
        yield {
            "arm": arm,
            "name": "prompts shorter than keep-all's",
            "found": mine["prompt_tokens"],
            "bound": base["prompt_tokens"],
            "holds": mine["prompt_tokens"] < base["prompt_tokens"],
        }


def _digest(runs: Mapping[str, Sequence[RunResult]]) -> str:
    columns = [
        [arm, run.key.task, [[step["leyline"]["receipt"][name] for name in TOKEN_COLUMNS] for step in run.steps]]
        for arm, chosen in runs.items()
        for run in chosen
    ]
    return hashlib.sha256(json.dumps(columns).encode()).hexdigest()


def _task(name: str, run: RunResult) -> dict[str, Any]:
    assert run.end is not None
    return {"task": name, "turns": run.end["turns"], "recorded_turns": run.end["recorded_turns"]}


def _failure(result: RunResult) -> dict[str, Any]:
    error = result.end["error"] if result.end else "cut off"
    return {"arm": result.key.arm, "task": result.key.task, "error": error}


def _run(run: RunResult) -> dict[str, Any]:
    turns = [
        {"turn": step["turn"], "tool": step["tool"], "ttft_ms": step["ttft_ms"], "receipt": step["leyline"]["receipt"]}
        for step in run.steps
    ]
    return {"arm": run.key.arm, "task": run.key.task, "turns": turns}


def table(summary: Mapping[str, Any]) -> str:
    """The summary as text."""
    heads = ("arm", "requests", "prompt", "cached", "rotated", "prefilled", "replaced", "hit rate", "avoided",
             "p50 ms", "p95 ms", "p50 edited")  # fmt: skip
    rows: list[tuple[str, ...]] = [heads]
    for arm, figures in summary["arms"].items():
        times = [_ms(figures["ttft_ms"], "p50"), _ms(figures["ttft_ms"], "p95")]
        tokens = [figures[name] for name in TOKEN_COLUMNS]
        share = "-" if figures["hit_rate"] is None else f"{figures['hit_rate']:.1%}"
        edited = _ms(figures["ttft_edited_turns_ms"], "p50")
        row = (arm, figures["requests"], *tokens, share, figures["reprefill_avoided_tokens"], *times, edited)
        rows.append(tuple(map(str, row)))
    lines = columns(rows)
    for check in summary["checks"]:
        verdict = "holds" if check["holds"] else "DOES NOT HOLD"
        lines.append(f"{verdict}: {check['arm']}: {check['name']} ({check['found']} against {check['bound']})")
    lines += [f"FAILED: {one['arm']} {one['task']}: {one['error']}" for one in summary["failed"]]
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text; the first column to the left, numbers to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _ms(times: Mapping[str, float] | None, name: str) -> str:
    return "-" if times is None else f"{times[name]:.0f}"
