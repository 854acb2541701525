"""Milliseconds per turn, and bytes kept, at 200 messages of 64,000 tokens with nothing new to edit. Asserts nothing.

python tests/policies/bench_plan.py
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

from tool_loops import START, Message, reading

from leyline_client.policy import Edit, PolicySet, available, resolve

TURNS = 300


def measured(action: Callable[[], object], clock: Callable[[], float]) -> tuple[float, float]:
    times = []
    for _ in range(TURNS):
        start = clock()
        action()
        times.append((clock() - start) * 1e3)
    return statistics.median(times), min(times)


def warmed(policies: PolicySet, messages: list[Message]) -> list[Edit]:
    standing: list[Edit] = []
    for end in range(4, len(messages) + 1, 2):
        standing += policies.plan(messages[:end], standing=standing)
    return standing


def main() -> None:
    messages = [*START, *(one for turn in reading(99, 2_480, files=7) for one in turn)]
    print(
        f"{len(messages)} messages, {resolve([]).transcript(messages).tokens:,} tokens (estimated), {TURNS} turns each"
    )
    print("policy                   wall p50   wall min   cpu p50  [ms]   kept [kB]")
    for name, factory in available().items():
        if name == "attention-mass":
            continue
        tracemalloc.start()
        policies = resolve([factory()])
        standing = warmed(policies, messages)
        kept = tracemalloc.get_traced_memory()[0] / 1e3
        tracemalloc.stop()
        wall = measured(lambda: policies.plan(messages, standing=standing), time.perf_counter)  # noqa: B023
        cpu = measured(lambda: policies.plan(messages, standing=standing), time.process_time)  # noqa: B023
        print(f"{name:24}{wall[0]:9.2f}{wall[1]:11.2f}{cpu[0]:10.2f}{kept:18.0f}")


if __name__ == "__main__":
    main()
