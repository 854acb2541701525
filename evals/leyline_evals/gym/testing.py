"""Test doubles: an OpenAI-compatible HTTP server and a session that edits. Neither needs a model."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import openai

Reply = Callable[[dict[str, Any]], dict[str, Any]]
"""From a request's body to the assistant message."""


def says_ok(body: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - the Reply signature
    """The simplest reply: a text and no tool call."""
    return {"role": "assistant", "content": "ok"}


class FakeChatServer:
    """Serves ``/v1/chat/completions`` on a free local port; use it as a context manager.

    ``bodies`` holds every request in the order of arrival. ``statuses`` is a list of HTTP statuses for the next
    requests; at 200 or when it is empty, ``reply`` answers. Token counts are characters / 4.
    """

    def __init__(self, reply: Reply = says_ok) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner._answer(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """The server's root, without ``/v1``."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop serving; later connections are refused."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            self.bodies.append(body)
            status = self.statuses.pop(0) if self.statuses else 200
        if status != 200:
            self._send(handler, status, "application/json", json.dumps({"error": {"message": f"status {status}"}}))
            return
        completion = _completion(body, self.reply(body))
        if body.get("stream"):
            chunks = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(completion))
            self._send(handler, 200, "text/event-stream", chunks + "data: [DONE]\n\n")
        else:
            self._send(handler, 200, "application/json", json.dumps(completion))

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, status: int, kind: str, text: str) -> None:
        raw = text.encode()
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(raw)))
        handler.send_header("Connection", "close")  # or a closed server would go on answering old connections
        handler.end_headers()
        handler.wfile.write(raw)


class StubbingSession:
    """Behaves as a session should: plans from the messages, and takes a plan as done only when a reply came.

    For every arm but ``keep-all`` it sends all tool results but the last two as stubs. ``planned`` lists the plan of
    every attempt, ``done`` the stubbed positions that a reply has confirmed.
    """

    def __init__(self, base_url: str, arm: str) -> None:
        self.arm = arm
        self.planned: list[tuple[int, ...]] = []
        self.done: set[int] = set()
        self._client: Any = openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _create(self, messages: list[dict[str, Any]], **request: Any) -> Any:
        results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
        stubbed = [] if self.arm == "keep-all" else results[:-2]
        self.planned.append(tuple(index for index in stubbed if index not in self.done))
        sent = copy.deepcopy(messages)
        for index in stubbed:
            sent[index]["content"] = "[cleared]"
        reply = self._client.chat.completions.create(messages=sent, extra_body={"arm": self.arm}, **request)
        self.done.update(stubbed)
        return reply


def stubbing_session(base_url: str, arm: str, seed: int) -> StubbingSession:  # noqa: ARG001 - the factory's signature
    """A session factory for tests."""
    return StubbingSession(base_url, arm)


def _completion(body: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    prompt = len(json.dumps(body["messages"])) // 4
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 1,
        "total_tokens": prompt + 1,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
        "leyline": {
            "session": "secret-session-id",
            "version": 1,
            "receipt": {"prefilled_tokens": prompt - prompt // 2},
        },
    }


def _chunks(completion: dict[str, Any]) -> list[dict[str, Any]]:
    message = completion["choices"][0]["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": letter} for letter in message.get("content") or ""]
    for index, call in enumerate(message.get("tool_calls") or []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        start = {"index": index, "id": call["id"], "type": "function", "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [start]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in arguments]
    base = {"id": completion["id"], "object": "chat.completion.chunk", "created": 0, "model": completion["model"]}
    chunks = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    chunks.append({**base, "choices": [], "usage": completion["usage"], "leyline": completion["leyline"]})
    return chunks
