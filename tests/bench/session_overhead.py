"""What a session adds to a turn: ``python tests/bench/session_overhead.py [messages] [tokens]``.

A transport that answers at once stands in for the network. Every turn is sent once by each case, one after the other,
and by a bare httpx client (what any client must do): the overhead of a case is the median of its turns' differences to
the bare client's, in CPU milliseconds of the thread. Memory is what a session holds on to after its last turn.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx

from leyline_client import LeylineSession
from leyline_client.testing import tool_call

CHARACTERS_PER_TOKEN = 4
TURNS = 60
GOAL_MS = 2.0
CASES: dict[str, list[Any]] = {
    "no policies": [],
    "stale-tool-detector": ["stale-tool-detector"],
    "truncate-older-than-n:n=999": ["truncate-older-than-n:n=999"],
    "clear-tool-uses": ["clear-tool-uses"],
    "token-budget": ["token-budget:trigger=900000,target=100000"],
    "last-n-observations:n=999": ["last-n-observations:n=999"],
    "clear-thinking": ["clear-thinking"],
    "ephemeral-tags": ["ephemeral-tags"],
    "redact": ["redact"],
    "tiered": ["tiered:trigger=900000,summarise_trigger=900000"],
    "transform": ["transform"],
    "stale-tool-detector, token-budget": ["stale-tool-detector", "token-budget:trigger=900000,target=100000"],
}
"""Every policy but attention-mass, which needs what no server sends yet. None of them finds anything to edit: the turns
that are nearly all turns."""


def message_pair(number: int, characters: int) -> list[dict[str, Any]]:
    """A tool call and its result."""
    line = f'{number}: the quick brown fox "jumps" over the lazy dog\n'
    text = (line * (characters // len(line) + 1))[:characters]
    return [
        {"role": "assistant", "content": None, "tool_calls": [tool_call("read", {"n": number}, f"c{number}")]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": text},
    ]


def instant_transport() -> httpx.MockTransport:
    """Answers every turn at once."""
    info = _info()
    state = {"version": 0}

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/info"):
            return httpx.Response(200, json=info)
        state["version"] += 1
        receipt = {"prompt_tokens": 64_000, "cached_tokens": 63_000, "prefilled_tokens": 1_000}
        leyline = {"session": "s" * 24, "version": state["version"], "receipt": receipt}
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json={**body, "leyline": leyline})

    return httpx.MockTransport(handle)


def _info() -> Any:
    from leyline_client.testing import FakeServer

    return json.loads(httpx.Client(transport=FakeServer().transport).get("http://f/leyline/v1/info").content)


Turn = list[dict[str, Any]]


def conversation(count: int, characters: int) -> Iterator[Turn]:
    """``TURNS`` turns of a history that grows by two messages each, to ``count`` messages."""
    per_message = characters // (count // 2)
    messages: Turn = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for number in range(count // 2 - 1 - TURNS):
        messages += message_pair(number, per_message)
    for number in range(TURNS):
        messages = [*messages, *message_pair(10_000 + number, per_message)]
        yield messages


def milliseconds(action: Callable[[Turn], object], messages: Turn) -> float:
    """CPU time of this thread."""
    started = time.thread_time()
    action(messages)
    return (time.thread_time() - started) * 1e3


def measured(count: int, characters: int) -> dict[str, list[float]]:
    """Milliseconds of every turn, by case; ``bare`` is the plain client."""
    http = httpx.Client(transport=instant_transport())
    actions: dict[str, Callable[[Turn], object]] = {
        "bare": lambda messages: http.post("http://f/v1/c", json={"model": "m", "messages": messages}).json()
    }
    with ExitStack() as stack:
        for name, policies in CASES.items():
            session = LeylineSession("http://f", policies=policies, transport=instant_transport())
            create = stack.enter_context(session).chat.completions.create
            actions[name] = lambda messages, create=create: create(model="m", messages=messages)
        times: dict[str, list[float]] = {name: [] for name in actions}
        for number, messages in enumerate(conversation(count, characters)):
            names = list(actions)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                times[name].append(milliseconds(actions[name], messages))
    return times


def held(count: int, characters: int) -> float:
    """Megabytes a session holds after the last turn, the agent's own history not counted."""
    tracemalloc.start()
    with LeylineSession("http://f", policies=CASES["stale-tool-detector"], transport=instant_transport()) as session:
        for messages in conversation(count, characters):
            session.chat.completions.create(model="m", messages=messages)
        del messages
        gc.collect()
        size = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    return size


def main() -> None:
    """Print a table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 64_000
    characters = tokens * CHARACTERS_PER_TOKEN
    print(f"{count} messages, {tokens:,} tokens of {CHARACTERS_PER_TOKEN} characters, {TURNS} turns, CPU ms")
    print(f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    times = measured(count, characters)
    print(f"{'':36}{'p50':>7}{'p90':>7}{'over bare (p50)':>18}")
    for name, found in times.items():
        p50, p90 = statistics.median(found), statistics.quantiles(found, n=10)[-1]
        over = statistics.median(one - bare for one, bare in zip(found, times["bare"], strict=True))
        print(f"{name:36}{p50:7.2f}{p90:7.2f}{over:18.2f}{'' if over <= GOAL_MS else '  over the goal'}")
    print()
    for size in (count, 2 * count, 4 * count):
        print(f"held after {size:4} messages: {held(size, characters * size // count):.2f} MB")


if __name__ == "__main__":
    main()
