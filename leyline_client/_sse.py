"""Server-sent events, from bytes to JSON objects, without any I/O."""

from __future__ import annotations

import json
from typing import Any

from ._errors import SERVER_ERRORS, ProtocolError, error_from_body


class ChunkParser:
    """Turns the bytes of a streamed OpenAI reply into its chunks, however the bytes are cut.

    Takes ``\\n``, ``\\r\\n`` and ``\\r`` line ends, comments, and data spread over several lines.
    """

    def __init__(self) -> None:
        self.done = False
        """``[DONE]`` was seen; what follows is ignored."""
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The chunks that ``data`` completes.

        Raises:
            ProtocolError: an event is no JSON object.
            ServerError: an event carries an error.
        """
        buffer = self._rest + data
        # A lone \r at the end may be the first half of \r\n.
        held = buffer.endswith(b"\r")
        lines = (buffer[:-1] if held else buffer).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + (b"\r" if held else b"")
        return [chunk for line in lines for chunk in self._line(line)]

    def finish(self) -> list[dict[str, Any]]:
        """The chunk that the end of the stream completes.

        Raises:
            ProtocolError: the stream ended before ``[DONE]``.
        """
        chunks = self.feed(b"\n\n") if self._rest or self._data else []
        if not self.done:
            raise ProtocolError("the stream ended before [DONE]: the reply is cut off")
        return chunks

    def _line(self, line: bytes) -> list[dict[str, Any]]:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value[1:] if value.startswith(b" ") else value)
            return []
        if not self._data or self.done:
            return []
        data, self._data = b"\n".join(self._data), []
        if data.strip() == b"[DONE]":
            self.done = True
            return []
        return [_chunk(data)]


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise ProtocolError("the stream holds an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise ProtocolError("the stream holds an event that is no JSON object")
    if chunk.get("error"):
        code = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
        known = SERVER_ERRORS.get(code) if isinstance(code, str) else None
        raise error_from_body(code if isinstance(code, int) else known.status if known else 500, chunk)
    return chunk


def encode_chunk(chunk: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The last event of every OpenAI stream."""
