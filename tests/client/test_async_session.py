from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from leyline_client import (
    AsyncLeylineSession,
    Executed,
    HistoryEdited,
    LeylineWarning,
    Reason,
    Receipt,
    ServerTimeout,
    leyline_of,
)
from leyline_client.testing import FakeServer, Fault
from tests.client.loops import SYSTEM, USER, ClearFirst, history


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def session_of(server: FakeServer, *policies: Any, **options: Any) -> AsyncLeylineSession:
    return AsyncLeylineSession("http://fake", policies=policies, transport=server.async_transport, **options)


async def ask(session: Any, messages: list[Any], **arguments: Any) -> Receipt:
    reply = await session.chat.completions.create(model="m", messages=messages, **arguments)
    assert type(reply) is ChatCompletion
    return leyline_of(reply).receipt


async def test_a_loop_is_edited_and_spliced(server: FakeServer) -> None:
    async with session_of(server, ClearFirst()) as session:
        receipts = [await ask(session, history(turns)) for turns in (1, 2, 3)]
        assert [receipt.executed for receipt in receipts] == ["append", "amortize", "append"]
        assert session.receipts == receipts
        assert (await session.info()).model == "fake"
        assert (await session.undo()).version == 4
        assert (await session.purge()).version == 5
        assert (await ask(session, history(4))).executed is Executed.APPEND
    assert server.sessions == []


async def test_streams(server: FakeServer) -> None:
    session = session_of(server)
    stream = await session.chat.completions.create(model="m", messages=[USER], stream=True)
    assert isinstance(stream, openai.AsyncStream)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ok 1"
    assert leyline_of(stream).version == 1
    messages = [USER, {"role": "assistant", "content": "ok 1"}, USER]
    async for chunk in await session.chat.completions.create(model="m", messages=messages, stream=True):
        if chunk.choices[0].finish_reason:
            break
    await ask(session, [*messages, {"role": "assistant", "content": "ok 2"}, USER])
    assert session.stats.turns == 3
    async with await session.chat.completions.create(model="m", messages=messages, stream=True) as early:
        await anext(early)
    assert (await ask(session, [*messages, {"role": "assistant", "content": "ok"}, USER])).cached_tokens > 0
    await session.aclose()


async def test_conversations_run_side_by_side(server: FakeServer) -> None:
    session = session_of(server, ClearFirst())

    async def agent(number: int) -> list[Executed]:
        head = [SYSTEM, {"role": "user", "content": f"Task {number}"}]
        return [(await ask(session, [*head, *history(turns)[2:]])).executed for turns in range(1, 5)]

    ways = await asyncio.gather(*(agent(number) for number in range(8)))
    assert all(way == ["append", "amortize", "append", "append"] for way in ways)
    assert len(server.sessions) == 8


async def test_the_same_question_asked_at_once_is_two_conversations(server: FakeServer) -> None:
    inner = server.async_transport

    async def slow(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.01)
        return await inner.handle_async_request(request)

    session = AsyncLeylineSession("http://fake", transport=httpx.MockTransport(slow))
    await asyncio.gather(ask(session, [USER]), ask(session, [USER]))
    assert len(server.sessions) == 2


async def test_named_conversations_take_turns(server: FakeServer) -> None:
    session = session_of(server)
    one = session.conversation("one")
    await asyncio.gather(*(ask(one, [USER]) for _ in range(5)))
    assert len(server.sessions) == 1
    assert one.edits == ()
    await one.aclose()
    assert server.sessions == []


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.DROP_REPLY, Fault.REFUSE, Fault.OVERLOADED])
async def test_a_turn_survives_a_fault(server: FakeServer, fault: Fault) -> None:
    session = session_of(server, ClearFirst())
    await ask(session, history(1))
    server.inject(fault)
    await ask(session, history(2))
    assert (await ask(session, history(3))).executed is Executed.APPEND
    assert len(server.sessions) == 1


async def test_a_cancelled_turn_leaves_a_conversation_that_goes_on(server: FakeServer) -> None:
    inner, hold = server.async_transport, asyncio.Event()

    async def slow(request: httpx.Request) -> httpx.Response:
        response = await inner.handle_async_request(request)
        if len(server.turns) == 2:
            await hold.wait()
        return response

    session = AsyncLeylineSession("http://fake", transport=httpx.MockTransport(slow))
    await ask(session, history(1))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(session, history(2)), 0.05)
    hold.set()
    receipt = await ask(session, history(2))
    assert receipt.cached_tokens > 0
    assert len(server.sessions) == 1


async def test_errors_recovery_and_fallback(server: FakeServer) -> None:
    session = session_of(server, max_retries=0, on_history_edit="error")
    await ask(session, history(1))
    server.inject(Fault.TIMEOUT, Fault.LOSE_SESSIONS)
    with pytest.raises(ServerTimeout):
        await ask(session, history(2))
    assert (await ask(session, history(2))).reason is Reason.SESSION_RECOVERED
    changed = history(3)
    changed[3]["content"] = "changed"
    with pytest.raises(HistoryEdited):
        await ask(session, changed)
    plain = session_of(FakeServer(extension=False), strategy="fallback")
    with pytest.warns(LeylineWarning):
        assert (await ask(plain, history(1))).reason is Reason.UNSUPPORTED_SERVER
