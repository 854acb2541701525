"""AKV's table: the time to the first token after a long context was compacted, by the way it was compacted."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from leyline_client import Directive
from leyline_evals.mechanism_load import STOCK, Served, Server, Tokens
from leyline_evals.stats import quantile

CONFIGURATIONS = ("no compaction", "summarisation", "truncation + re-prefill", "drop+repos")


@dataclass(frozen=True)
class LongContext:
    """Tokens: of a context of ``length``, ``evicted`` from ``head`` on are given up; ``append`` new ones follow.

    ``summary`` tokens are written by the summariser, which is the served model itself and sees the context it has
    cached: the cheapest real summariser there is.
    """

    length: int = 3000
    head: int = 256
    evicted: int = 1500
    append: int = 64
    summary: int = 48
    rounds: int = 5


PAPER_LONG = LongContext(length=64_000, head=4096, evicted=32_000, append=512, summary=512, rounds=8)


def measure(server: Server, sizes: LongContext, limit: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per configuration; TTFT in milliseconds. A prompt beyond ``limit`` tokens is said not to fit."""
    rows: list[dict[str, Any]] = []
    for name in CONFIGURATIONS:
        if name == CONFIGURATIONS[0] and sizes.length + sizes.append >= limit:
            rows.append({"configuration": name, "fits": False})
            continue
        rounds = [_compact(server, name, sizes, index) for index in range(sizes.rounds)]
        times = sorted(sum(one.milliseconds for one in steps) for steps in rounds)
        summaries = sorted(steps[0].milliseconds for steps in rounds if len(steps) > 1)
        rows.append(
            {
                "configuration": name,
                "fits": True,
                "rounds": sizes.rounds,
                "prompt_tokens": rounds[0][-1].prompt_tokens,
                "prefilled_tokens": round(median(sum(one.prefilled_tokens for one in steps) for steps in rounds)),
                "ttft_ms": {"p50": quantile(times, 0.5), "p95": quantile(times, 0.95)},
                "summary_ms": {"p50": quantile(summaries, 0.5)} if summaries else None,
            }
        )
        progress(f"long context, {name}: {rows[-1]['ttft_ms']['p50']:.0f} ms")
    return rows


def _compact(server: Server, name: str, sizes: LongContext, index: int) -> list[Served]:
    """The requests a user waits for until the first token of the turn after compaction."""
    tokens = Tokens(server.vocab_size, f"long {index}")
    context, new = tokens.take(sizes.length), tokens.take(sizes.append)
    instruction = tokens.take(16)
    turns = server.turns("leyline+amortize" if name == "drop+repos" else STOCK, secrets.token_hex(16))
    drop = Directive(start=sizes.head, end=sizes.head + sizes.evicted)
    try:
        turns.turn([], context, 1)  # the context is there already: not measured
        if name == "no compaction":
            return [turns.turn([], new, 1)]
        if name == "summarisation":
            asked = turns.turn([], instruction, sizes.summary)
            over = Directive(start=sizes.length, end=sizes.length + len(instruction))
            # Which tokens the summary has decides nothing here but their number.
            summary = tuple(tokens.take(sizes.summary))
            return [asked, turns.turn([drop.model_copy(update={"replacement": summary}), over], new, 1)]
        return [turns.turn([drop], new, 1)]
    finally:
        turns.close()
