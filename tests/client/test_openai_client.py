from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from leyline_client import AsyncLeylineSession, LeylineSession
from leyline_client.testing import FakeServer, Fault, ScriptedPolicy
from tests.client.loops import USER, ClearFirst, history


def test_the_genuine_client_runs_turns_of_the_session() -> None:
    server = FakeServer()
    with LeylineSession("http://fake", policies=[ClearFirst()], transport=server.transport) as session:
        client = session.openai
        assert type(client) is openai.OpenAI
        assert session.openai is client
        for turns in range(1, 4):
            client.chat.completions.create(model="m", messages=history(turns), extra_headers={"x-trace": "1"})
        assert [receipt.executed for receipt in session.receipts] == ["append", "amortize", "append"]
        assert client.models.list().data[0].id == "fake"
        stream = client.chat.completions.create(model="m", messages=history(4), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ok 4"
        assert session.stats.turns == 4
    headers = server.turns[0].headers
    assert headers["x-trace"] == "1"
    assert not [name for name in headers if name.startswith("x-stainless")]
    assert "authorization" not in headers


def test_what_create_does_not_do_the_genuine_client_does() -> None:
    class Answer(BaseModel):
        value: int

    with (
        FakeServer(['{"value": 3}', "hi", "raw"]) as server,
        LeylineSession("http://fake", transport=server.transport) as session,
    ):
        parsed = session.chat.completions.parse(model="m", messages=[USER], response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(value=3)
        with session.conversation("k").chat.completions.stream(model="m", messages=[USER]) as stream:
            assert stream.get_final_completion().choices[0].message.content == "hi"
        raw = session.chat.completions.with_raw_response.create(model="m", messages=[USER])
        assert raw.parse().choices[0].message.content == "raw"
        assert session.stats.turns == 3
        assert len(server.sessions) == 2


def test_errors_are_openais_own() -> None:
    server = FakeServer()
    policy = ScriptedPolicy([[], [], [], ValueError("boom")])
    with LeylineSession("http://fake", policies=[policy], max_retries=0, transport=server.transport) as session:
        client = session.openai
        server.inject(Fault.OVERLOADED, Fault.TIMEOUT, Fault.REFUSE)
        with pytest.raises(openai.InternalServerError, match="injected") as refused:
            client.chat.completions.create(model="m", messages=[USER])
        assert refused.value.code == "overloaded"
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="m", messages=[USER])
        with pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(model="m", messages=[USER])
        with pytest.raises(openai.UnprocessableEntityError, match="boom"):
            client.chat.completions.create(model="m", messages=[USER])
    with LeylineSession("http://fake", transport=FakeServer(extension=False).transport) as session:
        with pytest.raises(openai.InternalServerError, match="no Leyline extension") as missing:
            session.openai.chat.completions.create(model="m", messages=[USER])
        assert missing.value.status_code == 501


async def test_the_async_client_too() -> None:
    server = FakeServer()
    transport = server.async_transport
    async with AsyncLeylineSession("http://fake", policies=[ClearFirst()], transport=transport) as session:
        client = session.openai
        assert type(client) is openai.AsyncOpenAI
        for turns in range(1, 4):
            await client.chat.completions.create(model="m", messages=history(turns))
        assert [receipt.executed for receipt in session.receipts] == ["append", "amortize", "append"]
        assert [model.id async for model in client.models.list()] == ["fake"]
        stream = await client.chat.completions.create(model="m", messages=history(4), stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ok 4"
        parsed: Any = await session.chat.completions.with_raw_response.create(model="m", messages=history(5))
        assert parsed.parse().choices
        assert session.stats.turns == 5
