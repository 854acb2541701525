from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_client import LeylineSession, leyline_of
from leyline_client._history import JsonWriter
from leyline_client._replay import Generated, MessageAssembler
from leyline_client.testing import FakeServer, tool_call
from tests.client.loops import TOOLS, USER

ARGUMENTS = '{"path": "a.py",  "lines": [1, 2]}'


def conversation(reply: dict[str, Any], replayed: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    """The receipt of the turn after ``reply``, which the framework sends back as ``replayed``; and what was sent."""
    with (
        FakeServer([reply, "end"]) as server,
        LeylineSession("http://fake", transport=server.transport, **options) as session,
    ):
        session.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        message = {"role": "assistant", "content": None, **replayed}
        tail = {"role": "tool", "tool_call_id": "c", "content": "done"} if "tool_calls" in replayed else USER
        answer = session.chat.completions.create(model="m", messages=[USER, message, tail], tools=TOOLS)
        return leyline_of(answer).receipt, dict(server.turns[1].body["messages"][1])


def test_arguments_written_anew_do_not_lose_the_cache() -> None:
    compact = json.dumps(json.loads(ARGUMENTS), separators=(",", ":"))
    reply = {"tool_calls": [tool_call("read", ARGUMENTS, "c")]}
    replayed = {"tool_calls": [tool_call("read", compact, "c")]}
    receipt, sent = conversation(reply, replayed)
    assert receipt.drift_tokens == 0
    assert sent["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    receipt, sent = conversation(reply, replayed, restore_replies=False)
    assert receipt.drift_tokens > 0
    assert sent["tool_calls"][0]["function"]["arguments"] == compact


def test_a_stripped_newline_does_not_lose_the_cache() -> None:
    receipt, sent = conversation({"content": "\nSure, I will.\n"}, {"content": "Sure, I will."})
    assert receipt.drift_tokens == 0
    assert sent["content"] == "\nSure, I will.\n"


def test_blank_lines_before_a_call_do_not_lose_the_cache() -> None:
    calls = [tool_call("read", ARGUMENTS, "c")]
    receipt, sent = conversation({"content": "\n\n", "tool_calls": calls}, {"content": None, "tool_calls": calls})
    assert receipt.drift_tokens == 0
    assert sent["content"] == "\n\n"


@pytest.mark.parametrize(
    "changed",
    [
        tool_call("read", '{"path": "b.py", "lines": [1, 2]}', "c"),
        tool_call("read", '{"path": "a.py", "lines": [true, 2]}', "c"),
        tool_call("read", '{"path": "a.py", "lines": [1.0, 2]}', "c"),
        tool_call("read", '{"path":"a.py","lines":[1,2]}', "another"),
        tool_call("read", "no json", "c"),
    ],
)
def test_what_means_something_else_is_sent_as_it_is(changed: dict[str, Any]) -> None:
    reply = {"tool_calls": [tool_call("read", ARGUMENTS, "c")]}
    _, sent = conversation(reply, {"tool_calls": [changed]})
    assert sent["tool_calls"] == [changed]


def test_the_agents_own_objects_stay_as_they_are() -> None:
    generated = Generated()
    generated.note({"content": None, "tool_calls": [tool_call("read", ARGUMENTS, "c")]})
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [tool_call("read", '{"lines":[1,2],"path":"a.py"}', "c")],
    }
    before = json.dumps(message)
    history = JsonWriter().read([USER, message])
    restored = generated.restore(history)
    assert json.dumps(message) == before
    assert restored.messages[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert json.loads(restored.fragments[1]) == restored.messages[1]
    assert generated.restore(restored) is restored


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(), JSON, max_size=4), indent=st.sampled_from([None, 0, 2]))
def test_any_spelling_of_the_same_arguments_is_restored(arguments: dict[str, Any], indent: int | None) -> None:
    generated = Generated()
    original = json.dumps(arguments, indent=1)
    generated.note({"tool_calls": [tool_call("f", original, "c")]})
    respelt = json.dumps(arguments, indent=indent, ensure_ascii=False)
    try:
        respelt.encode()
    except UnicodeEncodeError:
        respelt = json.dumps(arguments)
    message = {"role": "assistant", "tool_calls": [tool_call("f", respelt, "c")]}
    restored = generated.restore(JsonWriter().read([message]))
    assert restored.messages[0]["tool_calls"][0]["function"]["arguments"] == original


def test_a_streamed_reply_is_put_together() -> None:
    assembler = MessageAssembler()
    for delta in (
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"tool_calls": [{"index": 1, "id": "y", "function": {"name": "f", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
    ):
        assembler.feed({"choices": [{"index": 0, "delta": delta}]})
    assembler.feed({"choices": []})
    (message,) = assembler.messages()
    assert message["content"] == "ab"
    assert {call["id"]: call["function"]["arguments"] for call in message["tool_calls"]} == {"x": "{}", "y": "{}"}
