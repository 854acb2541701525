"""Results per arm: solve rates with intervals, paired comparisons with keep-all, tokens and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyline_evals.gym.results import RunKey, RunResult
from leyline_evals.stats import Interval, mcnemar_exact, paired_bootstrap, paired_counts, quantile, wilson_interval

BASELINE = "keep-all"


def summarize(results: Sequence[RunResult]) -> dict[str, Any]:
    """A JSON-ready summary of finished runs; runs that failed are counted per arm and otherwise left out.

    Per arm: runs, solved, ``solve_rate`` (Wilson 95 %), turns, prompt, cached, completion and prefilled tokens,
    seconds, TTFT p50 and p95 in milliseconds. For every arm but ``keep-all`` that was run beside it, ``against``
    holds the comparison over the (task, seed) pairs both finished: counts, exact McNemar p, and the paired bootstrap
    interval of the difference in solve rate and in prefilled tokens.

    ``prefilled_tokens`` comes from receipts where there are any, else from prompt minus cached tokens.
    """
    by_arm: dict[str, list[RunResult]] = {}
    for result in results:
        by_arm.setdefault(result.key.arm, []).append(result)
    return {
        "tasks": sorted({result.key.task for result in results}),
        "seeds": sorted({result.key.seed for result in results}),
        "arms": {arm: _arm(runs) | _against(runs, by_arm.get(BASELINE, [])) for arm, runs in by_arm.items()},
    }


def step_prefilled(step: dict[str, Any]) -> int:
    """Tokens prefilled for one turn."""
    receipt = (step.get("leyline") or {}).get("receipt") or {}
    if "prefilled_tokens" in receipt:
        return int(receipt["prefilled_tokens"])
    return int(step.get("prompt_tokens") or 0) - int(step.get("cached_tokens") or 0)


def _arm(runs: Sequence[RunResult]) -> dict[str, Any]:
    done = [run for run in runs if run.done]
    steps = [step for run in done for step in run.steps]
    ttft = sorted(step["ttft_ms"] for step in steps if step.get("ttft_ms") is not None)
    solved = sum(run.resolved for run in done)
    return {
        "runs": len(done),
        "failed": len(runs) - len(done),
        "solved": solved,
        "solve_rate": _interval(wilson_interval(solved, len(done))) if done else None,
        "turns": len(steps),
        "prompt_tokens": _total(steps, "prompt_tokens"),
        "cached_tokens": _total(steps, "cached_tokens"),
        "completion_tokens": _total(steps, "completion_tokens"),
        "prefilled_tokens": sum(map(step_prefilled, steps)),
        "seconds": round(sum(run.end["seconds"] for run in done if run.end), 3),
        "ttft_ms": {"p50": quantile(ttft, 0.5), "p95": quantile(ttft, 0.95)} if ttft else None,
    }


def _against(runs: Sequence[RunResult], baseline: Sequence[RunResult]) -> dict[str, Any]:
    first, second = _by_case(baseline), _by_case(runs)
    cases = sorted(first.keys() & second.keys())
    if not cases or runs[0].key.arm == BASELINE:
        return {}
    counts = paired_counts(
        {case: first[case].resolved for case in cases}, {case: second[case].resolved for case in cases}
    )
    solved = paired_bootstrap(*([float(side[case].resolved) for case in cases] for side in (first, second)))
    prefilled = paired_bootstrap(*([float(_prefilled(side[case])) for case in cases] for side in (first, second)))
    comparison = {
        "arm": BASELINE,
        "pairs": len(cases),
        "both": counts.both,
        "only_baseline": counts.only_first,
        "only_this": counts.only_second,
        "neither": counts.neither,
        "mcnemar_p": mcnemar_exact(counts.only_first, counts.only_second),
        "solve_rate_difference": _interval(solved),
        "prefilled_difference_per_run": _interval(prefilled),
    }
    return {"against": comparison}


def _by_case(runs: Sequence[RunResult]) -> dict[tuple[str, int], RunResult]:
    return {_case(run.key): run for run in runs if run.done}


def _case(key: RunKey) -> tuple[str, int]:
    return key.task, key.seed


def _prefilled(run: RunResult) -> int:
    return sum(map(step_prefilled, run.steps))


def _total(steps: Sequence[dict[str, Any]], field: str) -> int:
    return sum(int(step.get(field) or 0) for step in steps)


def _interval(interval: Interval) -> dict[str, float]:
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high}
