"""Unedited multi-turn traffic on two servers at once: the same request to one, then to the other, in changing order."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
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
class Pair:
    """The same request on both servers."""

    turn: int
    ms: Mapping[str, float]


def run(
    clients: Mapping[str, httpx.Client], *, conversations: int, turns: int, words: int, new_tokens: int
) -> list[Pair]:
    """Latencies of ``conversations`` times ``turns`` requests on SGLang's own OpenAI route of every server.

    Turns after the first find the earlier ones cached, as in real traffic. Conversations go in turn by turn, so that
    the trees hold many of them at once.
    """
    talks = [Conversation(seed, words, {name: [] for name in clients}) for seed in range(conversations)]
    pairs: list[Pair] = []
    names = list(clients)
    for turn in range(turns):
        for talk in talks:
            order = names if len(pairs) % 2 == 0 else names[::-1]
            taken = {name: _turn(clients[name], talk, name, turn, new_tokens) for name in order}
            pairs.append(Pair(turn, taken))
    return pairs


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


def figures(pairs: list[Pair], measured: str, base: str) -> dict[str, Any]:
    """Medians of both servers, their ratio, and the median of the pairs' ratios (which drift of the machine spares)."""
    ours, theirs = ([pair.ms[name] for pair in pairs] for name in (measured, base))
    ratios = [pair.ms[measured] / pair.ms[base] for pair in pairs]
    return {
        "requests": len(pairs),
        f"{measured}_ms": round(median(ours), 3),
        f"{base}_ms": round(median(theirs), 3),
        "median_ratio": round(median(ours) / median(theirs), 4),
        "paired_median_ratio": round(median(ratios), 4),
        "samples": {measured: [round(ms, 3) for ms in ours], base: [round(ms, 3) for ms in theirs]},
    }
