from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from leyline_client import AsyncLeylineSession
from leyline_client.testing import FakeServer, Fault, tool_call
from tests.client.loops import TOOLS, USER, ClearFirst, history

pytest.importorskip("starlette", reason="the extra 'proxy' is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra 'proxy' is not installed")

from leyline_client._proxy import STATS_PATH, make_app  # noqa: E402
from leyline_client.cli import proxy as cli  # noqa: E402


@contextmanager
def proxied(server: FakeServer, *policies: Any, key: str | None = None, **options: Any) -> Iterator[str]:
    session = AsyncLeylineSession("http://fake", policies=policies, transport=server.async_transport, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(make_app(session, key=key), log_level="error", lifespan="on"))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not web.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def client_of(url: str, **options: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0, **options) as client:
        yield client


def test_a_plain_openai_client_gets_edits_and_splices() -> None:
    server = FakeServer()
    with proxied(server, ClearFirst()) as url, client_of(url) as client:
        executed = []
        for turns in range(1, 4):
            reply: Any = client.chat.completions.create(model="m", messages=history(turns))
            executed.append(reply.leyline["receipt"]["executed"])
        assert executed == ["append", "amortize", "append"]
        assert client.models.list().data[0].id == "fake"
        stats = httpx.get(url + STATS_PATH).json()
    assert (stats["turns"], stats["edits"], stats["executed"]["amortize"]) == (3, 1, 1)
    assert server.sessions == []


def test_streams_and_tool_calls() -> None:
    calls = [tool_call("read", {"n": 1}, "a"), tool_call("read", {"n": 2}, "b")]
    with FakeServer(["hello there", {"tool_calls": calls}]) as server, proxied(server) as url, client_of(url) as client:
        first = client.chat.completions.create(model="m", messages=[USER], tools=TOOLS, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in first) == "hello there"
        messages = [USER, {"role": "assistant", "content": "hello there"}, USER]
        with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
            final = stream.get_final_completion()
        assert [call.function.arguments for call in final.choices[0].message.tool_calls or ()] == [
            '{"n": 1}',
            '{"n": 2}',
        ]
        assert server.turns[1].receipt is not None
        assert server.turns[1].receipt.cached_tokens > 0


def test_a_header_names_the_conversation() -> None:
    server = FakeServer()
    with proxied(server) as url, client_of(url) as client:
        for name in ("a", "b", "a"):
            header = {"x-leyline-conversation": name}
            client.chat.completions.create(model="m", messages=[USER], extra_headers=header)
        assert len(server.sessions) == 2


def test_refusals_keep_their_status_and_field() -> None:
    server = FakeServer()
    with proxied(server, max_retries=0) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(model="m", messages=[])
        server.inject(Fault.OVERLOADED, Fault.TIMEOUT)
        with pytest.raises(openai.InternalServerError) as overloaded:
            client.chat.completions.create(model="m", messages=[USER])
        assert overloaded.value.status_code == 503
        with pytest.raises(openai.InternalServerError) as late:
            client.chat.completions.create(model="m", messages=[USER])
        assert late.value.status_code == 504
        assert httpx.post(url + "/v1/chat/completions", content=b"{").status_code == 400
        assert httpx.get(url + "/nowhere").status_code == 404


def test_a_stream_that_breaks_says_so() -> None:
    server = FakeServer()
    with proxied(server) as url, client_of(url) as client:
        server.inject(Fault.CUT_STREAM)
        with pytest.raises(openai.APIError, match="broke"):
            list(client.chat.completions.create(model="m", messages=[USER], stream=True))


def test_a_key_is_asked_for() -> None:
    server = FakeServer(api_key="upstream")
    with proxied(server, key="sesame", api_key="upstream") as url:
        with client_of(url) as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="m", messages=[USER])
        with openai.OpenAI(base_url=url + "/v1", api_key="sesame") as client:
            assert client.chat.completions.create(model="m", messages=[USER]).choices
            assert client.models.list().data


def test_a_client_that_goes_away_ends_its_stream() -> None:
    server = FakeServer()
    with proxied(server) as url, client_of(url) as client:
        stream = client.chat.completions.create(model="m", messages=history(1), stream=True)
        next(iter(stream))
        stream.close()
        reply: Any = client.chat.completions.create(model="m", messages=history(2))
        assert reply.leyline["receipt"]["cached_tokens"] > 0


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["proxy", *given])


def test_the_command_refuses_what_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(extension=False).serve() as url:
        assert cli.run(arguments("--upstream", url)) == 2
        assert "no Leyline extension" in capsys.readouterr().err
        given = arguments("--upstream", url, "--strategy", "fallback", "--policy", "no-such")
        assert cli.run(given) == 2
        assert "no-such" in capsys.readouterr().err
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            assert cli.run(arguments("--upstream", url, "--strategy", "fallback", "--port", port)) == 2
        assert "cannot listen" in capsys.readouterr().err


def test_the_command_serves_and_ends_on_ctrl_c() -> None:
    code = (
        "import argparse, sys; from leyline_client.cli import proxy; p = argparse.ArgumentParser();"
        "proxy.add_parser(p.add_subparsers()); a = p.parse_args(); sys.exit(a.run(a))"
    )
    server = FakeServer()
    with server.serve() as url:
        command = [sys.executable, "-c", code, "proxy", "--upstream", url, "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stderr is not None
                line = process.stderr.readline()
                assert "leyline proxy: http://127.0.0.1:" in line
                with client_of(line.split()[2].removesuffix("/v1")) as client:
                    assert client.chat.completions.create(model="m", messages=[USER]).choices
                assert len(server.sessions) == 1
                process.send_signal(signal.SIGINT)
                rest = process.stderr.read()
                assert process.wait(20) == 0
            finally:
                process.kill()
    assert "Traceback" not in rest
    assert "append: " in rest
    assert server.sessions == []
