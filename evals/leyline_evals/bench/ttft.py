"""The benchmark proper: append, splice, splice with a stub, re-prefill, one after the other, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from leyline_client import LeylineClient

from .server import flush, say
from .turns import ARMS, Sample, Shape, Timer

GOALS = {
    "cached_fraction": (">=", 0.99),
    "splice_over_append": ("<=", 1.10),
    "splice_stub_over_append": (None, None),
    "reprefill_over_splice": (">=", 10.0),
}
"""What the figures are held against; the stub's is recorded without a goal."""


def measure(client: LeylineClient, shape: Shape, rounds: int, vocabulary: int) -> list[Sample]:
    """All arms in every round, each round from another arm on, so that drift of the machine hits all alike."""
    timer = Timer(client, shape, seed=shape.context, vocabulary=vocabulary)
    flush(client)
    for arm in ARMS:  # not counted: the first of each kind pays for what a server does once
        timer.take(arm)
    samples: list[Sample] = []
    for number in range(rounds):
        flush(client)
        shift = number % len(ARMS)
        taken = {arm: timer.take(arm) for arm in (*ARMS[shift:], *ARMS[:shift])}
        samples += taken.values()
        times = "  ".join(f"{arm} {taken[arm].ms:,.0f}" for arm in ARMS)
        say(f"  round {number + 1}/{rounds}: {times} ms")
    return samples


def times(samples: Sequence[Sample], arm: str) -> list[float]:
    """Milliseconds of an arm, in order."""
    return [sample.ms for sample in samples if sample.arm == arm]


def figures(samples: Sequence[Sample], shape: Shape) -> dict[str, Any]:
    """The result: medians, their ratios, and what they were taken from."""
    typical = {arm: median(times(samples, arm)) for arm in ARMS}
    spliced = [sample.receipt for sample in samples if sample.arm == "splice"]
    pairs = list(zip(times(samples, "splice"), times(samples, "append"), strict=True))
    return {
        **{f"{arm}_ms": round(typical[arm], 2) for arm in ARMS},
        "splice_over_append": round(typical["splice"] / typical["append"], 4),
        "splice_stub_over_append": round(typical["splice_stub"] / typical["append"], 4),
        "reprefill_over_splice": round(typical["reprefill"] / typical["splice"], 3),
        "paired_splice_over_append": round(median(splice / append for splice, append in pairs), 4),
        "context_tokens": shape.context,
        "cached_fraction": round(min(one.cached_tokens / one.prompt_tokens for one in spliced), 5),
        "graft_ms": round(median(one.graft_ms for one in spliced), 3),
        "shape": asdict(shape),
        "samples": [
            {
                "arm": sample.arm,
                "ms": round(sample.ms, 3),
                "graft_ms": sample.receipt.graft_ms,
                "prompt_tokens": sample.receipt.prompt_tokens,
                "cached_tokens": sample.receipt.cached_tokens,
                "rotated_tokens": sample.receipt.rotated_tokens,
                "prefilled_tokens": sample.receipt.prefilled_tokens,
            }
            for sample in samples
        ],
    }


def report(result: dict[str, Any]) -> str:
    """The figures next to their goals."""
    medians = (f"{arm} {result[arm + '_ms']:,.1f} ms" for arm in ARMS)
    lines = [f"medians: {', '.join(medians)}"]
    for name, (relation, goal) in GOALS.items():
        value = result[name]
        if relation is None:
            lines.append(f"  {name:<26}{value:>8.3f}   (recorded)")
            continue
        met = value >= goal if relation == ">=" else value <= goal
        lines.append(f"  {name:<26}{value:>8.3f}   goal {relation} {goal:g}: {'met' if met else 'not met'}")
    return "\n".join(lines)
