"""How a fake server meets the world: httpx transports, and a real port."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx

from ._faults import FakeReply, Fault, FaultRaised

if TYPE_CHECKING:
    from ._fake import FakeServer


class FakeTransport(httpx.BaseTransport):
    """A synchronous httpx transport into a fake server."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer, or break as the injected fault says."""
        body = request.read()
        reply = _handled(self._server, request, body)
        return _response(reply, _SyncBytes(reply.body) if not isinstance(reply.body, bytes) else None)


class AsyncFakeTransport(httpx.AsyncBaseTransport):
    """An asynchronous httpx transport into a fake server."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer, or break as the injected fault says."""
        body = await request.aread()
        reply = _handled(self._server, request, body)
        return _response(reply, _AsyncBytes(reply.body) if not isinstance(reply.body, bytes) else None)


class _SyncBytes(httpx.SyncByteStream):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._chunks
        except FaultRaised as raised:
            raise _broken(raised.fault) from None


class _AsyncBytes(httpx.AsyncByteStream):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            for chunk in self._chunks:
                yield chunk
        except FaultRaised as raised:
            raise _broken(raised.fault) from None


def _handled(server: FakeServer, request: httpx.Request, body: bytes) -> FakeReply:
    headers = {name.lower(): value for name, value in request.headers.items()}
    try:
        return server.handle(request.method, request.url.raw_path.decode(), headers, body)
    except FaultRaised as raised:
        raise _broken(raised.fault) from None


def _response(reply: FakeReply, stream: Any) -> httpx.Response:
    headers = {"content-type": reply.content_type}
    if stream is None:
        return httpx.Response(reply.status, headers=headers, content=reply.body)
    return httpx.Response(reply.status, headers=headers, stream=stream)


def _broken(fault: Fault) -> httpx.TransportError:
    if fault is Fault.REFUSE:
        return httpx.ConnectError("connection refused (injected)")
    if fault is Fault.TIMEOUT:
        return httpx.ReadTimeout("no reply in time (injected)")
    return httpx.RemoteProtocolError("the connection broke (injected)")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            reply = self.server.fake.handle(self.command, self.path, headers, body)
            self._write(reply)
        except FaultRaised as raised:
            if raised.fault is Fault.TIMEOUT:
                self.server.closing.wait()
            self.close_connection = True

    do_GET = do_POST = do_DELETE = _answer

    def _write(self, reply: FakeReply) -> None:
        self.send_response(reply.status)
        self.send_header("content-type", reply.content_type)
        if isinstance(reply.body, bytes):
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in reply.body:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: paths and prompts do not belong in a test's output."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, fake: FakeServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fake = fake
        self.closing = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server's."""


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Serve on a free local port; gives the base URL, and closes the port afterwards."""
    server = _Server(fake)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
