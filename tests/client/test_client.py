from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

import httpx
import pytest

from leyline_client import _http
from leyline_client._client import AsyncLeylineClient, LeylineClient
from leyline_client._errors import (
    ConfigurationError,
    ExtensionMissing,
    InvalidEdit,
    LeylineError,
    NothingToUndo,
    ProtocolError,
    ServerTimeout,
    ServerUnreachable,
    UnknownSession,
    UpstreamError,
    VersionConflict,
)
from leyline_client._models import Directive, Edit, Executed, Mode, Reason, TurnOptions
from leyline_client._wire import SpliceRequest
from leyline_client.testing import FakeServer, Fault

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "List the files, then read the longest one of them."}


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def client(server: FakeServer) -> Iterator[LeylineClient]:
    with LeylineClient("http://fake/v1/", transport=server.transport) as client:
        yield client


def httpx_exceptions() -> list[type[Exception]]:
    names = [getattr(httpx, name) for name in httpx.__all__]
    return sorted((n for n in names if inspect.isclass(n) and issubclass(n, Exception)), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("kind", httpx_exceptions(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stream", [False, True], ids=["reply", "stream"])
def test_every_httpx_exception_is_mapped(kind: type[Exception], stream: bool) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        if issubclass(kind, httpx.HTTPStatusError):
            raise kind("broken", request=request, response=httpx.Response(500))
        raise kind() if not inspect.signature(kind).parameters else kind("broken")

    with (
        LeylineClient("http://fake", transport=httpx.MockTransport(broken)) as client,
        pytest.raises(LeylineError) as e,
    ):
        client.chat_completions({"messages": [USER]}, stream=stream)
    assert e.value.__cause__ is not None
    expected: type[LeylineError] = ServerUnreachable
    if issubclass(kind, httpx.TimeoutException):
        expected = ServerTimeout
    elif kind in {httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.CookieConflict}:
        expected = ConfigurationError
    elif kind in {httpx.DecodingError, httpx.TooManyRedirects, httpx.HTTPStatusError}:
        expected = ProtocolError
    assert type(e.value) is expected


def test_the_enumeration_sees_httpx() -> None:
    kinds = httpx_exceptions()
    assert {httpx.ConnectTimeout, httpx.ReadError, httpx.StreamConsumed, httpx.InvalidURL} <= set(kinds)
    assert all(issubclass(kind, _http.HTTPX_ERRORS) for kind in kinds)


@pytest.mark.parametrize("url", ["", "localhost:30000", "ftp://host", "http://", 3])
def test_a_bad_base_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        LeylineClient(url)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_urls_in_openai_style_are_understood(url: str) -> None:
    assert LeylineClient(url).base_url == "http://h:1"


def test_info_names_the_server(client: LeylineClient) -> None:
    info = client.info()
    assert (info.model, info.enabled, info.modes) == ("fake", True, (Mode.AMORTIZE, Mode.FORGET))


def test_another_protocol_version_is_refused_before_its_fields_are_read() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"protocol": 2, "new": True}))
    with pytest.raises(ProtocolError, match="protocol 2"):
        LeylineClient("http://fake", transport=transport).info()


def test_a_server_without_the_extension_is_told_apart() -> None:
    client = LeylineClient("http://fake", transport=FakeServer(extension=False).transport)
    with pytest.raises(ExtensionMissing, match="--radix-cache-backend leyline"):
        client.info()
    with pytest.raises(ExtensionMissing):
        client.chat_completions({"messages": [USER]}, stream=True)


def test_an_engines_own_404_is_not_a_missing_extension() -> None:
    body = {"object": "error", "message": "model 'x' is not served", "type": "NotFound", "code": 404}
    transport = httpx.MockTransport(lambda request: httpx.Response(404, json=body))
    with pytest.raises(UpstreamError, match="not served") as error:
        LeylineClient("http://fake", transport=transport).chat_completions({"messages": [USER]})
    assert error.value.http_status == 404


def test_the_api_key_travels() -> None:
    server = FakeServer(api_key="sesame")
    with pytest.raises(UpstreamError) as error:
        LeylineClient("http://fake", transport=server.transport).info()
    assert error.value.http_status == 401
    assert LeylineClient("http://fake", transport=server.transport, api_key="sesame").info().enabled


def test_a_conversation_appends(client: LeylineClient) -> None:
    first = client.chat_completions({"messages": [SYSTEM, USER]}, options=TurnOptions())
    info = first["leyline"]
    history = [SYSTEM, USER, first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    options = TurnOptions(session=info["session"], expected_version=info["version"])
    second = client.chat_completions({"messages": history}, options=options)
    receipt = second["leyline"]["receipt"]
    assert second["leyline"]["version"] == 2
    assert receipt["executed"] == "append"
    assert receipt["cached_tokens"] == first["usage"]["total_tokens"]
    assert receipt["cached_tokens"] + receipt["prefilled_tokens"] == receipt["prompt_tokens"]


def tool_history(output: str = "a.py b.py " * 50) -> list[dict[str, object]]:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    return [
        SYSTEM,
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": output},
        {"role": "user", "content": "And now the tests."},
    ]


@pytest.mark.parametrize("mode", list(Mode))
def test_an_edit_is_accounted_for_in_its_mode(client: LeylineClient, server: FakeServer, mode: Mode) -> None:
    history = tool_history()
    first = client.chat_completions({"messages": history}, options=TurnOptions())
    total = first["usage"]["total_tokens"]
    history = [*history, first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    edit = Edit(message=3, replacement="[cleared]", mode=mode)
    options = TurnOptions(session=first["leyline"]["session"], expected_version=1, edits=(edit,))
    plan = client.plan({"messages": history}, options=options)
    receipt = client.chat_completions({"messages": history}, options=options)["leyline"]["receipt"]
    assert plan.receipt.model_dump(mode="json") == receipt
    assert receipt["executed"] == mode.value
    (directive,) = receipt["directives"]
    evicted = directive["end"] - directive["start"]
    assert evicted == server.count_tokens(str(history[3]["content"]))
    if mode is Mode.AMORTIZE:
        assert receipt["cached_tokens"] == total - evicted
        assert receipt["rotated_tokens"] == total - directive["end"]
        assert receipt["influenced_tokens"] > 0
    else:
        assert receipt["cached_tokens"] == directive["start"]
        assert receipt["dropped_tokens"] == total - directive["start"]
    assert server.turns[-1].messages[3]["content"] == "[cleared]"
    assert history[3]["content"] != "[cleared]"


def test_a_standing_edit_costs_nothing_again(client: LeylineClient) -> None:
    history = tool_history()
    edit = Edit(message=3, replacement="[cleared]")
    info = client.chat_completions({"messages": history}, options=TurnOptions())["leyline"]
    for text in ("one", "two"):
        history = [
            *history,
            {"role": "assistant", "content": f"ok {info['version']}"},
            {"role": "user", "content": text},
        ]
        options = TurnOptions(session=info["session"], expected_version=info["version"], edits=(edit,))
        info = client.chat_completions({"messages": history}, options=options)["leyline"]
    assert info["receipt"]["executed"] == Executed.APPEND
    assert info["receipt"]["directives"] == []


def test_edits_without_a_session_are_a_reprefill(client: LeylineClient) -> None:
    options = TurnOptions(edits=(Edit(message=3),))
    receipt = client.chat_completions({"messages": tool_history()}, options=options)["leyline"]["receipt"]
    assert (receipt["executed"], receipt["reason"]) == (Executed.REPREFILL, Reason.NEW_SESSION)


def test_undo_and_purge(client: LeylineClient) -> None:
    history = tool_history()
    info = client.chat_completions({"messages": history}, options=TurnOptions())["leyline"]
    with pytest.raises(NothingToUndo):
        client.undo(info["session"])
    before = client.get_session(info["session"])
    options = TurnOptions(session=info["session"], edits=(Edit(message=3, replacement="[cleared]"),))
    client.chat_completions({"messages": history}, options=options)
    assert client.get_session(info["session"]).influenced_tokens > 0
    undone = client.undo(info["session"], expected_version=2)
    assert undone.version == 3
    assert client.get_session(info["session"]).tokens == before.tokens
    client.chat_completions({"messages": history}, options=options)
    purged = client.purge(info["session"])
    assert purged.receipt.executed is Executed.FORGET
    assert client.get_session(info["session"]).influenced_tokens == 0
    client.delete_session(info["session"])
    with pytest.raises(UnknownSession):
        client.get_session(info["session"])


def test_a_stale_version_is_refused_with_the_right_one(client: LeylineClient) -> None:
    info = client.chat_completions({"messages": [USER]}, options=TurnOptions())["leyline"]
    options = TurnOptions(session=info["session"], expected_version=0)
    with pytest.raises(VersionConflict) as error:
        client.chat_completions({"messages": [USER]}, options=options)
    assert error.value.detail["version"] == 1


def test_another_salts_session_is_unknown(client: LeylineClient) -> None:
    info = client.chat_completions({"messages": [USER], "cache_salt": "a"}, options=TurnOptions())["leyline"]
    assert client.get_session(info["session"], cache_salt="a").version == 1
    with pytest.raises(UnknownSession):
        client.get_session(info["session"], cache_salt="b")


def test_a_refusal_names_the_field(client: LeylineClient) -> None:
    body = {"messages": [USER], "leyline": {"edits": [{"message": 0}, {"message": True}]}}
    with pytest.raises(InvalidEdit) as error:
        client.chat_completions(body)
    assert error.value.param == "leyline.edits[1].message"
    assert error.value.http_status == 422


def test_splice_on_tokens(client: LeylineClient, server: FakeServer) -> None:
    tokens = client.render([USER], add_generation_prompt=False).token_ids
    assert tokens is not None
    first = client.splice(SpliceRequest(append=tuple(tokens)))
    request = SpliceRequest(
        session=first.session, expected_version=1, directives=(Directive(start=2, end=6),), append=tuple(tokens[:3])
    )
    second = client.splice(request)
    source = len(tokens) + len(first.output_ids)
    assert second.receipt.prompt_tokens == source - 4 + 3
    assert second.receipt.cached_tokens == source - 4
    assert second.text == "ok 2"


def test_render_gives_the_span_of_every_text(client: LeylineClient, server: FakeServer) -> None:
    history = tool_history()
    reply = client.render(history)
    assert reply.token_ids is not None
    decode = server._engine.tokenizer.decode
    texts = {(s.message, s.part.value): decode(reply.token_ids[s.start : s.end]) for s in reply.spans}
    assert texts[(1, "content")] == USER["content"]
    assert texts[(3, "content")] == history[3]["content"]
    assert texts[(2, "arguments")] == "{}"


@pytest.mark.parametrize("session", ["", "a/b", "../info", "ü", "a b"])
def test_a_session_id_cannot_leave_its_path(client: LeylineClient, session: str) -> None:
    with pytest.raises(ConfigurationError, match="session id"):
        client.get_session(session)


def test_streaming_chunks_end_with_the_leyline_object(client: LeylineClient) -> None:
    with client.chat_completions({"messages": [USER]}, options=TurnOptions(), stream=True) as stream:
        chunks = list(stream)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == "ok 1"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["leyline"]["version"] == 1


def test_a_cut_stream_is_an_error_not_an_end(client: LeylineClient, server: FakeServer) -> None:
    server.inject(Fault.CUT_STREAM)
    stream = client.chat_completions({"messages": [USER]}, options=TurnOptions(), stream=True)
    with pytest.raises(ServerUnreachable):
        list(stream)


def test_a_body_that_is_no_json_is_a_protocol_error() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with pytest.raises(ProtocolError, match="not JSON"):
        LeylineClient("http://fake", transport=transport).chat_completions({"messages": [USER]})


def test_what_cannot_be_json_is_refused_here(client: LeylineClient, server: FakeServer) -> None:
    with pytest.raises(ConfigurationError, match="JSON"):
        client.chat_completions({"messages": [USER], "temperature": float("nan")})
    assert server.requests == []


async def test_the_async_client_does_the_same(server: FakeServer) -> None:
    async with AsyncLeylineClient("http://fake", transport=server.async_transport) as client:
        assert (await client.info()).model == "fake"
        first = await client.chat_completions({"messages": tool_history()}, options=TurnOptions())
        options = TurnOptions(session=first["leyline"]["session"], edits=(Edit(message=3, replacement="[cleared]"),))
        plan = await client.plan({"messages": tool_history()}, options=options)
        assert plan.receipt.executed is Executed.AMORTIZE
        async with await client.chat_completions({"messages": tool_history()}, options=options, stream=True) as stream:
            chunks = [chunk async for chunk in stream]
        assert chunks[-1]["leyline"]["receipt"]["executed"] == "amortize"
        session = first["leyline"]["session"]
        assert (await client.undo(session)).version == 3
        assert (await client.purge(session, expected_version=3)).version == 4
        assert (await client.get_session(session)).version == 4
        rendered = await client.render([USER], return_token_ids=False)
        assert rendered.token_ids is None
        spliced = await client.splice(SpliceRequest(append=(1, 2, 3)))
        assert spliced.version == 1
        await client.delete_session(session)
        with pytest.raises(UnknownSession):
            await client.get_session(session)


async def test_async_errors_are_mapped_too(server: FakeServer) -> None:
    client = AsyncLeylineClient("http://fake", transport=server.async_transport)
    server.inject(Fault.TIMEOUT, Fault.REFUSE, Fault.CUT_STREAM)
    with pytest.raises(ServerTimeout):
        await client.chat_completions({"messages": [USER]})
    with pytest.raises(ServerUnreachable):
        await client.chat_completions({"messages": [USER]}, stream=True)
    with pytest.raises(ServerUnreachable):
        [chunk async for chunk in await client.chat_completions({"messages": [USER]}, stream=True)]
    await client.aclose()


def test_on_a_real_port() -> None:
    server = FakeServer(["hello", "again"])
    with server.serve() as url, LeylineClient(url) as client:
        assert client.chat_completions({"messages": [USER]})["choices"][0]["message"]["content"] == "hello"
        chunks = list(client.chat_completions({"messages": [USER]}, stream=True))
        assert chunks[-1]["leyline"]["version"] == 1
    with pytest.raises(ServerUnreachable):
        LeylineClient(url).info()


def test_no_prompt_text_in_errors(client: LeylineClient) -> None:
    with pytest.raises(LeylineError) as error:
        client.render([{"role": "user", "content": "SECRET"}], edits=[Edit(message=3)])
    assert "SECRET" not in str(error.value)
    assert "SECRET" not in json.dumps(dict(getattr(error.value, "detail", {})))
