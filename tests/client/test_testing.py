from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline_client import Edit, InternalError, LeylineClient, LeylineSession, Mode, TooManySessions, TurnOptions
from leyline_client.testing import FakeServer, Fault, ScriptedPolicy, ScriptExhausted, UnconsumedSteps, tool_call
from tests.client.loops import SYSTEM, USER, history


def test_unplayed_steps_raise() -> None:
    with pytest.raises(UnconsumedSteps, match="1 scripted"), FakeServer(["a", "b"]) as server:
        LeylineClient("http://fake", transport=server.transport).chat_completions({"messages": [USER]})
    with pytest.raises(AssertionError, match="timeout"), FakeServer() as server:
        server.inject("timeout")
    with pytest.raises(UnconsumedSteps), FakeServer(["a"]).serve():
        pass
    with pytest.raises(UnconsumedSteps, match="scripted"), ScriptedPolicy([[]]):
        pass


def test_a_turn_without_a_step_fails() -> None:
    server = FakeServer([])
    with pytest.raises(InternalError, match="0 steps"):
        LeylineClient("http://fake", transport=server.transport).chat_completions({"messages": [USER]})
    with pytest.raises(ScriptExhausted):
        ScriptedPolicy([]).plan(object())


def test_an_error_in_the_test_is_not_hidden_by_unplayed_steps() -> None:
    with pytest.raises(KeyError), FakeServer(["a"]):
        raise KeyError


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="meteor"):
        FakeServer().inject("meteor")


def test_sessions_are_bounded() -> None:
    server = FakeServer(max_sessions=1)
    client = LeylineClient("http://fake", transport=server.transport)
    client.chat_completions({"messages": [USER]})
    with pytest.raises(TooManySessions):
        client.chat_completions({"messages": [SYSTEM, USER]})


def test_what_was_forgotten_is_not_reused_by_anyone() -> None:
    server = FakeServer()
    with LeylineSession("http://fake", transport=server.transport) as session:
        session.chat.completions.create(model="m", messages=history(3))
        other = LeylineClient("http://fake", transport=server.transport)
        before = other.chat_completions({"messages": history(3)}, options=TurnOptions())
        (name, *_) = server.sessions
        options = TurnOptions(session=name, edits=(Edit(message=3, replacement="", mode=Mode.FORGET),))
        other.chat_completions({"messages": history(3)}, options=options)
        after = other.chat_completions({"messages": history(3)}, options=TurnOptions())
    cached = [reply["leyline"]["receipt"]["cached_tokens"] for reply in (before, after)]
    assert cached[1] < cached[0]


def test_spliced_kv_is_not_shared_with_a_clean_history() -> None:
    server = FakeServer()
    client = LeylineClient("http://fake", transport=server.transport)
    info = client.chat_completions({"messages": history(3)}, options=TurnOptions())["leyline"]
    options = TurnOptions(session=info["session"], edits=(Edit(message=3, replacement="[cleared]"),))
    client.chat_completions({"messages": history(4)}, options=options)
    edited = history(4)
    edited[3]["content"] = "[cleared]"
    receipt = client.chat_completions({"messages": edited}, options=TurnOptions())["leyline"]["receipt"]
    assert receipt["cached_tokens"] < client.render(history(1)[:4]).prompt_tokens


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.DROP_REPLY, Fault.CUT_STREAM])
def test_faults_on_a_real_port(fault: Fault) -> None:
    server = FakeServer()
    with server.serve() as url, httpx.Client(base_url=url) as http:
        server.inject(fault)
        with pytest.raises(httpx.RemoteProtocolError):
            http.post("/v1/chat/completions", json={"messages": [USER], "stream": True})
        assert http.post("/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    assert len(server.turns) == (1 if fault is Fault.REFUSE else 2)


def test_a_timeout_on_a_real_port() -> None:
    server = FakeServer()
    with server.serve() as url:
        server.inject(Fault.TIMEOUT)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + "/v1/chat/completions", json={"messages": [USER]}, timeout=0.2)


CONTENT = st.text(alphabet="ab \n", max_size=12)


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[list[dict[str, Any]], list[Edit]]]:
    """A growing history, and the standing edits of each of its turns."""
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": draw(CONTENT) + "x"}]
    edits: list[Edit] = []
    result = []
    for number in range(draw(st.integers(1, 5))):
        call = tool_call("f", {"n": number}, f"c{number}")
        messages = [
            *messages,
            {"role": "assistant", "content": draw(st.none() | CONTENT), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": draw(CONTENT)},
        ]
        free = [i for i in range(3, len(messages) - 2, 2) if i not in {edit.message for edit in edits}]
        for index in free if draw(st.booleans()) else ():
            mode = draw(st.sampled_from(Mode))
            edits = [*edits, Edit(message=index, replacement=draw(CONTENT), mode=mode)]
        result.append((messages, edits))
    return result


@settings(deadline=None)
@given(plan=turns())
def test_receipts_of_the_fake_add_up(plan: list[tuple[list[dict[str, Any]], list[Edit]]]) -> None:
    server = FakeServer()
    client = LeylineClient("http://fake", transport=server.transport)
    session, version = None, None
    for messages, edits in plan:
        options = TurnOptions(session=session, expected_version=version, edits=tuple(edits))
        reply = client.chat_completions({"messages": messages}, options=options)
        receipt = server.turns[-1].receipt
        assert receipt is not None
        assert receipt.prompt_tokens == reply["usage"]["prompt_tokens"]
        assert receipt.prompt_tokens == client.render(messages, edits=edits).prompt_tokens
        assert receipt.cached_tokens + receipt.prefilled_tokens == receipt.prompt_tokens
        assert 0 <= receipt.rotated_tokens <= receipt.cached_tokens
        assert receipt.influenced_tokens <= receipt.prompt_tokens
        assert receipt.prefilled_tokens >= 1
        ends = [segment.end for segment in receipt.segments]
        assert ends == sorted(ends)
        session, version = reply["leyline"]["session"], reply["leyline"]["version"]
