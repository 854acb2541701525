"""Unedited multi-turn traffic on several servers at once: each request to all of them, in changing order."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx


@dataclass
class Conversation:
    """One conversation, held on every server alike; each server's own replies stay in its history."""

    seed: int
    words: int
    histories: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def question(self, turn: int) -> dict[str, str]:
        """What the user says in that turn."""
        chosen = random.Random(1_000 * self.seed + turn)
        return {"role": "user", "content": " ".join(f"{chosen.randrange(1 << 16):x}" for _ in range(self.words))}


@dataclass(frozen=True, slots=True)
class Sample:
    """The same request on every server: milliseconds by server."""

    turn: int
    ms: Mapping[str, float]


def run(
    clients: Mapping[str, httpx.Client], *, conversations: int, turns: int, words: int, new_tokens: int
) -> list[Sample]:
    """Latencies of ``conversations`` times ``turns`` requests on SGLang's own OpenAI route of every server.

    Turns after the first find the earlier ones cached, as in real traffic. Conversations go in turn by turn, so that
    the trees hold many of them at once.
    """
    talks = [Conversation(seed, words, {name: [] for name in clients}) for seed in range(conversations)]
    samples: list[Sample] = []
    names = list(clients)
    for turn in range(turns):
        for talk in talks:
            shift = len(samples) % len(names)
            taken = {
                name: _turn(clients[name], talk, name, turn, new_tokens) for name in (*names[shift:], *names[:shift])
            }
            samples.append(Sample(turn, taken))
    return samples


def _turn(client: httpx.Client, talk: Conversation, name: str, turn: int, new_tokens: int) -> float:
    history = talk.histories[name]
    history.append(talk.question(turn))
    body = {
        "model": "default",
        "messages": history,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    began = time.perf_counter()
    reply = client.post("/v1/chat/completions", json=body)
    ms = 1e3 * (time.perf_counter() - began)
    reply.raise_for_status()
    history.append({"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"] or ""})
    return ms


def figures(samples: Sequence[Sample], base: str) -> dict[str, Any]:
    """By server its median; by every server but ``base`` the ratio of medians, and the median of the requests' ratios.

    The latter is spared the machine's drift.
    """
    names = list(samples[0].ms)
    taken = {name: [sample.ms[name] for sample in samples] for name in names}
    others = [name for name in names if name != base]
    return {
        "requests": len(samples),
        "median_ms": {name: round(median(taken[name]), 3) for name in names},
        "median_ratio": {name: round(median(taken[name]) / median(taken[base]), 4) for name in others},
        "paired_median_ratio": {
            name: round(median(a / b for a, b in zip(taken[name], taken[base], strict=True)), 4) for name in others
        },
        "samples": {name: [round(ms, 3) for ms in taken[name]] for name in names},
    }
