from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_client import Overloaded, ProtocolError, UpstreamError
from leyline_client._errors import error_body
from leyline_client._sse import DONE, ChunkParser, encode_chunk


def parsed(data: bytes, cuts: list[int]) -> list[dict[str, Any]]:
    parser, chunks, last = ChunkParser(), [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        chunks += parser.feed(data[last:cut])
        last = cut
    return chunks + parser.finish()


@given(
    values=st.lists(st.dictionaries(st.text(), st.text(), min_size=1), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    newline=st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_chunks_survive_any_cut_and_any_line_end(values: list[dict[str, str]], cuts: list[int], newline: bytes) -> None:
    values = [value for value in values if not value.get("error")]
    data = b": hello\n\n" + b"".join(map(encode_chunk, values)) + DONE
    assert parsed(data.replace(b"\n", newline), cuts) == values


def test_data_may_spread_over_lines_and_end_without_a_blank_one() -> None:
    assert parsed(b'event: x\ndata: {"a":\ndata:1}\n\ndata: [DONE]', []) == [{"a": 1}]


def test_what_follows_done_is_ignored() -> None:
    assert parsed(DONE + b"data: {}\n\n", []) == []


@pytest.mark.parametrize("data", [b"", b"data: {}\n\n", b'data: {"a": 1}'])
def test_an_end_without_done_is_a_cut(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="cut off"):
        parsed(data, [])


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 3\n\n"])
def test_what_is_no_json_object_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="JSON"):
        parsed(data, [])


def test_errors_in_the_stream_are_typed() -> None:
    with pytest.raises(Overloaded) as ours:
        parsed(encode_chunk(error_body(Overloaded("full"))), [])
    assert ours.value.http_status == 503
    with pytest.raises(UpstreamError, match="boom") as theirs:
        parsed(b"data: " + json.dumps({"error": {"message": "boom", "code": 400}}).encode() + b"\n\n", [])
    assert theirs.value.http_status == 400
