"""LeylineSession against the real server: an agent loop whose history stays whole while its cache is spliced."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs the server environment")

from leyline_client import AsyncLeylineSession, LeylineSession, Mode

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


def tool_turn(number: int, text: str) -> list[dict[str, Any]]:
    """What an agent adds to its history per turn: a call and its result."""
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "read", "arguments": json.dumps({"path": f"f{number}.py"})},
    }
    return [
        {"role": "assistant", "content": f"I will look at file {number}.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": text},
    ]


def loop(session: LeylineSession, turns: int = 6) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix bugs. " * 5},
        {"role": "user", "content": "Fix the failing test."},
    ]
    for number in range(turns):
        session.chat.completions.create(model="default", messages=history, tools=TOOLS, max_tokens=2, temperature=0)
        history += tool_turn(number, f"line of file {number}, long enough to be cut\n" * 15)
    session.chat.completions.create(model="default", messages=history, tools=TOOLS, max_tokens=2, temperature=0)
    return history


def test_the_edited_turns_prefill_what_an_append_would_and_the_replacements(server_tiny_gqa: Any) -> None:
    prefilled: dict[str, int] = {}
    with LeylineSession(server_tiny_gqa.base_url, cache_salt="loop keep") as keep:
        loop(keep)
        prefilled["keep"] = keep.stats.prefilled_tokens
    for mode in (Mode.AMORTIZE, Mode.FORGET):
        with LeylineSession(
            server_tiny_gqa.base_url, policies=["truncate-older-than-n:n=2"], mode=mode, cache_salt=f"loop {mode}"
        ) as session:
            history = loop(session)
            assert history[3]["content"].startswith("line of file 0"), "the agent's history stays whole"
            stats = session.stats
            assert stats.edits >= 4
            assert not stats.reasons, stats.reasons
            assert stats.prompt_tokens < keep.stats.prompt_tokens
            prefilled[mode] = stats.prefilled_tokens
            if mode is Mode.AMORTIZE:
                replacements = stats.replacement_tokens
                assert stats.rotated_tokens > 0
            else:
                assert stats.rotated_tokens == 0
    # Each turn's sampled last token and template tail may be computed anew: a handful per turn.
    assert prefilled[Mode.AMORTIZE] <= 1.05 * (prefilled["keep"] + replacements)
    assert prefilled[Mode.FORGET] > 1.2 * prefilled[Mode.AMORTIZE]


def test_streaming_through_the_session_gives_the_same_text_and_a_receipt(server_tiny_gqa: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Say something, slowly."}]
    with LeylineSession(server_tiny_gqa.base_url, cache_salt="stream") as session:
        plain = session.chat.completions.create(model="default", messages=messages, max_tokens=8, temperature=0)
        with LeylineSession(server_tiny_gqa.base_url, cache_salt="stream 2") as other:
            stream = other.chat.completions.create(
                model="default", messages=messages, max_tokens=8, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
            assert other.last is not None
            assert other.last.prompt_tokens == plain.usage.prompt_tokens
    assert "".join(pieces) == (plain.choices[0].message.content or "")


def test_conversations_at_once_under_asyncio(server_tiny_gqa: Any) -> None:
    async def one(session: AsyncLeylineSession, name: str) -> int:
        history: list[dict[str, Any]] = [
            {"role": "system", "content": f"Agent {name}."},
            {"role": "user", "content": "Go."},
        ]
        for number in range(3):
            await session.chat.completions.create(model="default", messages=history, max_tokens=2)
            history += tool_turn(number, f"{name} reads {number}\n" * 20)
        reply = await session.chat.completions.create(model="default", messages=history, max_tokens=2)
        assert reply.usage is not None
        return int(reply.usage.prompt_tokens)

    async def main() -> list[int]:
        async with AsyncLeylineSession(
            server_tiny_gqa.base_url, policies=["truncate-older-than-n:n=1"], cache_salt="async"
        ) as session:
            result = await asyncio.gather(*(one(session, name) for name in "abcdef"))
            assert session.stats.turns == 24
            assert not session.stats.reasons
            return list(result)

    lengths = asyncio.run(main())
    assert len(set(lengths)) == 1
