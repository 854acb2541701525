from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from leyline_client import (
    ConfigurationError,
    Executed,
    ExtensionMissing,
    HistoryEdited,
    LeylineSession,
    LeylineWarning,
    Mode,
    NothingToUndo,
    Overloaded,
    PolicyError,
    PolicyRegistrationError,
    PolicyRuleError,
    ProtocolError,
    Reason,
    Receipt,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
    TooManySessions,
    Unsupported,
    UpstreamError,
    VersionConflict,
    leyline_of,
)
from leyline_client._models import Edit
from leyline_client.testing import FakeServer, Fault, ScriptedPolicy, tool_call
from tests.client.loops import SYSTEM, TOOLS, USER, ClearFirst, RemoveFirst, history

Make = Callable[..., LeylineSession]


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def make(server: FakeServer) -> Iterator[Make]:
    made: list[LeylineSession] = []

    def build(*policies: Any, **options: Any) -> LeylineSession:
        transport = options.pop("transport", server.transport)
        made.append(LeylineSession("http://fake", policies=policies, transport=transport, **options))
        return made[-1]

    yield build
    for session in made:
        session.close()


def ask(session: Any, messages: list[Any], **arguments: Any) -> Receipt:
    reply = session.chat.completions.create(model="m", messages=messages, **arguments)
    return leyline_of(reply).receipt


def test_a_loop_pays_for_its_tail_only_although_it_edits(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst())
    first = ask(session, history(1))
    edited = ask(session, history(2))
    again = ask(session, history(3))
    assert first.executed is Executed.APPEND
    assert edited.executed is Executed.AMORTIZE
    assert edited.prefilled_tokens == edited.prompt_tokens - edited.cached_tokens
    assert again.executed is Executed.APPEND
    assert again.directives == ()
    assert next(m["content"] for m in server.turns[-1].messages if m["role"] == "tool") == "[cleared]"
    assert len({turn.body["leyline"]["session"] for turn in server.turns[1:]}) == 1
    assert [turn.body["leyline"]["expected_version"] for turn in server.turns] == [None, 1, 2]


def test_the_agents_history_is_sent_as_it_wrote_it(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst())
    ask(session, history(1))
    ask(session, messages := history(2))
    assert server.turns[-1].body["messages"] == messages == history(2)


def test_replies_are_openais_own_types(make: Make) -> None:
    reply = make().chat.completions.create(model="m", messages=[USER])
    assert type(reply) is ChatCompletion
    assert reply.choices[0].message.content == "ok 1"
    assert leyline_of(reply).version == 1
    dumped = reply.model_dump(mode="json", exclude={"leyline"})
    assert ChatCompletion.model_validate(dumped).choices == reply.choices


def test_a_replys_message_can_be_put_back_into_the_history(make: Make, server: FakeServer) -> None:
    session = make()
    messages: list[Any] = [SYSTEM, USER]
    reply = session.chat.completions.create(model="m", messages=messages)
    messages.append(reply.choices[0].message)
    messages.append({"role": "user", "content": "go on"})
    receipt = ask(session, messages)
    assert receipt.executed is Executed.APPEND
    assert receipt.drift_tokens == 0
    assert receipt.cached_tokens == reply.usage.total_tokens if reply.usage else False
    assert server.turns[-1].body["messages"][2] == {"role": "assistant", "content": "ok 1"}


def test_arguments_pass_through_untouched(make: Make, server: FakeServer) -> None:
    given = {
        "tools": TOOLS,
        "parallel_tool_calls": True,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "stop": ["x"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    extra = {"top_k": 5, "regex": "a+"}
    reply = make().chat.completions.create(
        model="m", messages=[USER], extra_body=extra, extra_headers={"x-trace": "7"}, user=openai.NOT_GIVEN, **given
    )
    body = dict(server.turns[0].body)
    body.pop("leyline")
    assert body == {"model": "m", "messages": [USER], "stream": False, **given, **extra}
    assert server.turns[0].headers["x-trace"] == "7"
    assert len(reply.choices) == 2
    assert reply.choices[1].logprobs is not None


def test_parallel_tool_calls_come_through(make: Make) -> None:
    calls = [tool_call("read", {"a": 1}), tool_call("read", {"a": 2})]
    with FakeServer([{"tool_calls": calls}, {"tool_calls": calls}]) as server:
        session = make(transport=server.transport)
        reply = session.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        assert [c.function.arguments for c in reply.choices[0].message.tool_calls] == ['{"a": 1}', '{"a": 2}']
        chunks = session.chat.completions.create(model="m", messages=[USER], tools=TOOLS, stream=True)
        text = ["", ""]
        for chunk in chunks:
            for call in chunk.choices[0].delta.tool_calls or ():
                text[call.index] += call.function.arguments
        assert text == ['{"a": 1}', '{"a": 2}']


def test_streams_are_openais_and_every_chunk_has_a_choice(make: Make) -> None:
    session = make()
    stream = session.chat.completions.create(model="m", messages=[USER], stream=True)
    assert isinstance(stream, openai.Stream)
    chunks = list(stream)
    assert all(type(chunk) is ChatCompletionChunk for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ok 1"
    assert leyline_of(stream).version == 1
    assert session.last == leyline_of(stream).receipt


def test_usage_is_streamed_where_it_is_asked_for(make: Make) -> None:
    stream = make().chat.completions.create(
        model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_consumer_that_stops_at_the_finish_reason_still_gets_its_receipt(make: Make, server: FakeServer) -> None:
    session = make()
    stream = session.chat.completions.create(model="m", messages=[USER], stream=True)
    for chunk in stream:
        if chunk.choices[0].finish_reason:
            break
    assert ask(session, [USER, {"role": "assistant", "content": "ok 1"}, USER]).executed is Executed.APPEND
    assert session.stats.turns == 2
    assert server.turns[1].body["leyline"]["expected_version"] == 1


@pytest.mark.parametrize("close", [True, False])
def test_a_stream_left_early_leaves_a_conversation_that_goes_on(make: Make, server: FakeServer, close: bool) -> None:
    session = make()
    ask(session, [USER])
    messages = [USER, {"role": "assistant", "content": "ok 1"}, USER]
    stream = session.chat.completions.create(model="m", messages=messages, stream=True)
    next(stream)
    if close:
        stream.close()
    receipt = ask(session, [*messages, {"role": "assistant", "content": "so far"}, USER])
    assert receipt.executed is Executed.APPEND
    assert receipt.cached_tokens > 0
    assert len(server.sessions) == 1


def test_without_policies_nothing_is_edited(make: Make) -> None:
    session = make()
    for turns in range(4):
        assert ask(session, history(turns)).executed is Executed.APPEND
    assert session.stats.cached_tokens > 0
    assert session.stats.edits == 0


def test_totals_are_those_of_the_receipts(make: Make) -> None:
    seen: list[Receipt] = []
    session = make(ClearFirst(), on_receipt=seen.append)
    for turns in range(1, 5):
        ask(session, history(turns))
    assert session.receipts == seen
    assert session.stats.turns == 4
    for name in ("prompt_tokens", "cached_tokens", "prefilled_tokens", "rotated_tokens"):
        assert getattr(session.stats, name) == sum(getattr(receipt, name) for receipt in seen)
    assert session.stats.executed == {Executed.APPEND: 3, Executed.AMORTIZE: 1}
    assert session.stats.edits == 1
    assert session.stats.estimated_tokens_kept_out > 0


@pytest.mark.parametrize(
    ("mode", "policy", "executed"),
    [
        (None, Mode.AMORTIZE, "amortize"),
        (None, Mode.FORGET, "forget"),
        ("forget", Mode.AMORTIZE, "forget"),
        ("amortize", Mode.AMORTIZE, "amortize"),
        ("amortize", Mode.FORGET, "forget"),
    ],
)
def test_the_sessions_mode_overrides_but_never_weakens_a_forget(
    make: Make, mode: Any, policy: Mode, executed: str
) -> None:
    session = make(ClearFirst(policy), mode=mode)
    ask(session, history(1))
    assert ask(session, history(2)).executed.value == executed


# --- several conversations -------------------------------------------------------------------------------------------


def test_a_sub_agent_with_the_same_system_prompt_is_another_conversation(make: Make, server: FakeServer) -> None:
    session = make()
    main, sub = history(1), [SYSTEM, {"role": "user", "content": "Sub-task: count the lines."}]
    ask(session, main)
    ask(session, sub)
    ask(session, [*sub, {"role": "assistant", "content": "ok 2"}, USER])
    ask(session, history(2))
    ask(session, [SYSTEM, {"role": "user", "content": "Another sub-task."}])
    sessions = [turn.body["leyline"]["session"] for turn in server.turns]
    assert sessions[0] is sessions[1] is sessions[4] is None
    assert None not in (sessions[2], sessions[3])
    assert sessions[2] != sessions[3]


def test_named_conversations_are_never_guessed(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst())
    a, b = session.conversation("a"), session.conversation("b")
    ask(a, history(1))
    ask(b, history(1))
    ask(session, history(1), extra_headers={"X-Leyline-Conversation": "a"})
    ask(a, history(2))
    assert [turn.body["leyline"]["session"] is None for turn in server.turns] == [True, True, False, False]
    assert len(a.edits) == 1
    assert b.edits == ()
    assert all("x-leyline-conversation" not in turn.headers for turn in server.turns)


def test_a_fork_keeps_the_edits_of_its_beginning(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst())
    for turns in (1, 2, 3, 4):
        ask(session, history(turns))
    other = [*history(2), {"role": "user", "content": "Something else."}]
    ask(session, other)
    assert server.turns[-1].body["leyline"]["session"] is None
    assert len(server.turns[-1].body["leyline"]["edits"]) == 1
    ask(session, history(5))
    assert server.turns[-1].body["leyline"]["session"] is not None


def test_dropping_the_last_turn_is_a_retry_in_the_same_conversation(make: Make, server: FakeServer) -> None:
    session = make()
    ask(session, history(1))
    ask(session, history(2))
    receipt = ask(session, [*history(1), {"role": "user", "content": "Try again."}])
    assert receipt.executed is Executed.APPEND
    assert receipt.cached_tokens > 0
    assert len(server.sessions) == 1


def test_surplus_conversations_are_ended_on_the_server_too(make: Make, server: FakeServer) -> None:
    session = make(max_conversations=2)
    for name in ("a", "b", "c"):
        ask(session.conversation(name), [USER])
    assert len(server.sessions) == 2
    session.close()
    assert server.sessions == []


def test_threads_share_a_session(server: FakeServer, make: Make) -> None:
    session = make(ClearFirst())
    failures: list[BaseException] = []

    def agent(number: int) -> None:
        try:
            head = [SYSTEM, {"role": "user", "content": f"Task {number}"}]
            for turns in range(1, 6):
                ask(session, [*head, *history(turns)[2:]])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(server.sessions) == 8
    assert session.stats.turns == 40
    assert session.stats.executed[Executed.AMORTIZE] == 8


def test_threads_of_one_named_conversation_take_turns(server: FakeServer, make: Make) -> None:
    conversation = make().conversation("one")
    failures: list[BaseException] = []

    def agent() -> None:
        try:
            for _ in range(5):
                ask(conversation, [USER])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=agent) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(server.sessions) == 1


# --- the agent edits its own history ---------------------------------------------------------------------------------


def test_a_message_changed_in_place_is_seen(make: Make, server: FakeServer) -> None:
    session = make()
    messages = history(3)
    ask(session, messages)
    messages[3]["content"] = "[shortened by the agent]"
    messages.extend(history(4)[-2:])
    receipt = ask(session, messages)
    assert receipt.executed is Executed.FORGET
    (directive,) = receipt.directives
    assert not directive.declared
    assert len(server.sessions) == 1


def test_history_edits_can_be_spliced(make: Make) -> None:
    session = make(on_history_edit="amortize")
    messages = history(3)
    ask(session, messages)
    messages[3]["content"] = "[shortened by the agent]"
    assert ask(session, [*messages, *history(4)[-2:]]).executed is Executed.AMORTIZE


def test_history_edits_can_be_refused_before_the_server_is_asked(make: Make, server: FakeServer) -> None:
    session = make(on_history_edit="error")
    messages = history(3)
    ask(session, messages)
    asked = len(server.requests)
    messages[3]["content"] = "[shortened by the agent]"
    with pytest.raises(HistoryEdited, match="message 3"):
        ask(session, [*messages, *history(4)[-2:]])
    assert len(server.requests) == asked


def test_a_sliding_window_moves_the_standing_edits_along(make: Make, server: FakeServer) -> None:
    clear = Edit(message=5, replacement="[cleared]")
    session = make(ScriptedPolicy([[], [clear], []]))
    ask(session, history(3))
    ask(session, history(4))
    messages = history(5)
    del messages[2:4]
    ask(session, messages)
    (edit,) = server.turns[-1].body["leyline"]["edits"]
    assert edit["message"] == 3
    assert server.turns[-1].messages[3]["content"] == "[cleared]"


def test_an_edit_of_a_changed_message_is_dropped(make: Make, server: FakeServer) -> None:
    session = make(ScriptedPolicy([[], [Edit(message=3, replacement="[cleared]")], []]))
    ask(session, history(3))
    ask(session, history(4))
    messages = history(5)
    messages[3]["content"] = "[the agent was faster]"
    ask(session, messages)
    assert server.turns[-1].body["leyline"]["edits"] == []
    assert server.turns[-1].messages[3]["content"] == "[the agent was faster]"


def test_removed_exchanges_come_back_whole_where_the_agent_touches_one_of_them(make: Make, server: FakeServer) -> None:
    session = make(RemoveFirst())
    ask(session, history(3))
    assert len(server.turns[-1].messages) == 8
    messages = history(4)
    messages[3]["content"] = "changed"
    session._engine.settings.policies = session._engine.settings.policies.__class__([])
    ask(session, messages)
    assert len(server.turns[-1].messages) == len(messages)


# --- things go wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.DROP_REPLY, Fault.REFUSE, Fault.OVERLOADED])
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_survives_a_fault_and_is_edited_once(make: Make, server: FakeServer, fault: Fault, stream: bool) -> None:
    session = make(ClearFirst())
    ask(session, history(1))
    server.inject(fault)
    if stream:
        list(session.chat.completions.create(model="m", messages=history(2), stream=True))
    else:
        ask(session, history(2))
    assert session.last is not None
    kept = [m["content"] for m in server.turns[-1].messages if m["role"] == "tool"]
    assert kept[0] == "[cleared]"
    assert ask(session, history(3)).executed is Executed.APPEND
    assert len(server.sessions) == 1
    assert session.stats.edits == 1
    assert session.stats.retries == 1


def test_a_first_turn_survives_a_fault(make: Make, server: FakeServer) -> None:
    session = make()
    server.inject(Fault.DROP_REPLY, Fault.TIMEOUT)
    assert ask(session, [USER]).prompt_tokens > 0
    assert session.stats.retries == 2


def test_retries_are_bounded_and_the_next_call_goes_on(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst(), max_retries=1)
    ask(session, history(1))
    server.inject(Fault.TIMEOUT, Fault.TIMEOUT)
    with pytest.raises(ServerTimeout):
        ask(session, history(2))
    receipt = ask(session, history(2))
    assert receipt.cached_tokens > 0
    assert next(m["content"] for m in server.turns[-1].messages if m["role"] == "tool") == "[cleared]"
    assert len(server.sessions) == 1


def test_a_cut_stream_raises_and_the_next_call_goes_on(make: Make, server: FakeServer) -> None:
    session = make()
    ask(session, history(1))
    server.inject(Fault.CUT_STREAM)
    with pytest.raises(ServerUnreachable):
        list(session.chat.completions.create(model="m", messages=history(2), stream=True))
    assert ask(session, history(2)).cached_tokens > 0
    assert len(server.sessions) == 1


def test_overload_is_raised_after_the_last_retry(make: Make, server: FakeServer) -> None:
    server.inject(Fault.OVERLOADED, Fault.OVERLOADED, Fault.OVERLOADED)
    with pytest.raises(Overloaded):
        ask(make(), [USER])


def test_a_lost_session_is_rebuilt_with_its_edits(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst())
    ask(session, history(1))
    ask(session, history(2))
    server.inject(Fault.LOSE_SESSIONS)
    receipt = ask(session, history(3))
    assert receipt.reason is Reason.SESSION_RECOVERED
    assert next(m["content"] for m in server.turns[-1].messages if m["role"] == "tool") == "[cleared]"
    assert ask(session, history(4)).reason is None
    assert session.stats.reasons == {Reason.SESSION_RECOVERED: 1}


def test_a_full_server_is_relieved_of_our_own_idle_conversations(make: Make) -> None:
    server = FakeServer(max_sessions=2)
    session = make(transport=server.transport)
    for name in ("a", "b", "c", "d"):
        ask(session.conversation(name), [USER])
    assert len(server.sessions) == 2
    assert ask(session.conversation("a"), history(1)).reason is None
    stranger = make(transport=server.transport)
    with pytest.raises(TooManySessions):
        ask(stranger, [USER])


def test_somebody_elses_turn_is_a_conflict(make: Make, server: FakeServer) -> None:
    session = make()
    ask(session, history(1))
    (stolen,) = server.sessions
    session.client.chat_completions({"messages": history(1), "leyline": {"session": stolen}})
    with pytest.raises(VersionConflict):
        ask(session, history(2))


def test_a_reply_without_a_receipt_is_a_protocol_error(make: Make, server: FakeServer) -> None:
    import httpx

    def strip(request: httpx.Request) -> httpx.Response:
        response = server.transport.handle_request(request)
        if request.url.path.endswith("chat/completions"):
            return httpx.Response(200, json={"choices": []})
        return response

    with pytest.raises(ProtocolError, match="leyline"):
        ask(make(transport=httpx.MockTransport(strip)), [USER])


def test_a_policys_fault_is_named_and_the_server_is_not_called(make: Make, server: FakeServer) -> None:
    with pytest.raises(PolicyError, match="scripted") as error:
        ask(make(ScriptedPolicy([ValueError("boom")])), [SYSTEM, USER])
    assert error.value.policy == "scripted"
    with pytest.raises(PolicyRuleError) as broken:
        ask(make(ScriptedPolicy([[Edit(message=0, replacement="no")]])), history(2))
    assert broken.value.rule
    assert server.turns == []


def test_a_failed_turn_leaves_no_edit_behind(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst(), max_retries=0)
    ask(session, history(1))
    server.inject(Fault.OVERLOADED)
    with pytest.raises(Overloaded):
        ask(session, history(2))
    assert session.stats.edits == 0
    assert ask(session, history(2)).executed is Executed.AMORTIZE


def test_an_engines_refusal_passes_through(make: Make) -> None:
    with pytest.raises(UpstreamError) as error:
        make().chat.completions.create(model="m", messages=[{"content": "no role"}])
    assert error.value.http_status == 400


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": "hello"},
        {"messages": []},
        {"messages": [3]},
        {"messages": [USER], "temperature": float("inf")},
        {"messages": [USER], "timeout": "soon"},
        {"messages": [USER], "response_format": dict},
        {"messages": [USER], "extra_body": {"leyline": {"session": "x"}}},
        {"messages": [USER], "extra_body": {"leyline": {"purge": "maybe"}}},
    ],
)
def test_bad_arguments_are_refused_here(make: Make, server: FakeServer, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        make().chat.completions.create(model="m", **arguments)
    assert server.turns == []


@pytest.mark.parametrize(
    "options",
    [{"strategy": "maybe"}, {"mode": "melt"}, {"on_history_edit": None}, {"max_retries": -1}, {"max_conversations": 0}],
)
def test_bad_options_are_refused(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        make(**options)


def test_an_unknown_policy_is_refused_by_name(make: Make) -> None:
    with pytest.raises(PolicyRegistrationError, match="no-such"):
        make("no-such")


# --- undo and purge --------------------------------------------------------------------------------------------------


def test_undo_is_not_undone_by_the_policy(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst())
    ask(session, history(1))
    with pytest.raises(NothingToUndo):
        session.undo()
    ask(session, history(2))
    assert session.undo().version == 3
    receipt = ask(session, history(3))
    assert receipt.executed is Executed.APPEND
    assert server.turns[-1].body["leyline"]["edits"] == []


def test_purge_through_the_session_and_in_a_turn(make: Make, server: FakeServer) -> None:
    session = make(ClearFirst())
    ask(session, history(1))
    assert ask(session, history(2)).influenced_tokens > 0
    assert session.purge().receipt.executed is Executed.FORGET
    assert ask(session, history(3)).influenced_tokens == 0
    ask(session, history(3), extra_body={"leyline": {"purge": True}})
    assert server.turns[-1].body["leyline"]["purge"] is True


def test_undo_needs_a_turn(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="no turn"):
        make().undo()


# --- strategies ------------------------------------------------------------------------------------------------------


def test_strict_refuses_a_plain_server(make: Make) -> None:
    plain = FakeServer(extension=False)
    with pytest.raises(ExtensionMissing, match="fallback"):
        ask(make(transport=plain.transport), [USER])
    assert plain.turns == []


def test_strict_refuses_a_server_that_cannot_splice(make: Make) -> None:
    disabled = FakeServer(enabled=False, refusals=["sliding window"])
    with pytest.raises(Unsupported, match="sliding window"):
        ask(make(transport=disabled.transport), [USER])


@pytest.mark.parametrize("kind", ["plain", "disabled"])
@pytest.mark.parametrize("stream", [False, True])
def test_fallback_edits_here_and_says_so_once(make: Make, kind: str, stream: bool) -> None:
    server = FakeServer(extension=False) if kind == "plain" else FakeServer(enabled=False, refusals=["why not"])
    session = make(ClearFirst(), strategy="fallback", transport=server.transport)

    def go(turns: int) -> None:
        answer = session.chat.completions.create(model="m", messages=history(turns), stream=stream)
        if stream:
            assert all(chunk.choices for chunk in answer)

    with pytest.warns(LeylineWarning, match="prefilled again"):
        go(1)
    go(2)
    go(3)
    assert [turn.path for turn in server.turns] == ["/v1/chat/completions"] * 3
    assert server.turns[1].messages[3]["content"] == "[cleared]"
    assert [receipt.executed for receipt in session.receipts] == ["append", "reprefill", "append"]
    assert {receipt.reason for receipt in session.receipts} == {Reason.UNSUPPORTED_SERVER}
    assert all(r.cached_tokens + r.prefilled_tokens == r.prompt_tokens > 0 for r in session.receipts)


def test_fallback_takes_one_refused_turn_without_the_extension(make: Make) -> None:
    with FakeServer([Unsupported("image parts"), "plain", "spliced"]) as server:
        session = make(strategy="fallback", transport=server.transport)
        with pytest.warns(LeylineWarning, match="refused a turn"):
            assert ask(session, [USER]).reason is Reason.UNSUPPORTED_REQUEST
        assert ask(session, [USER]).reason is None
    with pytest.raises(Unsupported):
        ask(make(transport=FakeServer([Unsupported("image parts")]).transport), [USER])


def test_a_missing_cache_report_is_detected(make: Make) -> None:
    server = FakeServer(extension=False, cache_report=False)
    session = make(strategy="fallback", transport=server.transport)
    with pytest.warns(LeylineWarning, match="prefilled again"):
        assert ask(session, history(1)).cached_tokens == 0
    with pytest.warns(LeylineWarning, match="enable-cache-report"):
        ask(session, history(2))


def test_zero_cached_tokens_are_not_taken_for_a_missing_report(make: Make) -> None:
    session = make(strategy="observe", transport=FakeServer(extension=False).transport)
    for turns in range(3):
        ask(session, history(turns))
    assert session.receipts[0].cached_tokens == 0
    assert session.receipts[1].cached_tokens > 0


def test_observe_edits_nothing_and_estimates(make: Make) -> None:
    server = FakeServer(extension=False)
    session = make(ClearFirst(), strategy="observe", transport=server.transport)
    for turns in range(1, 4):
        ask(session, history(turns))
    assert all(turn.messages == history(n + 1) for n, turn in enumerate(server.turns))
    assert session.stats.edits == 1
    freed = server.count_tokens(str(history(3)[3]["content"])) * 2
    assert freed * 0.5 < session.stats.estimated_tokens_kept_out < freed * 1.5
    assert {receipt.executed for receipt in session.receipts} == {Executed.APPEND}


# --- without the openai package --------------------------------------------------------------------------------------


def test_without_openai_replies_are_light_objects(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from leyline_client import _openai_types as types

    monkeypatch.setattr(types, "has_openai", lambda: False)
    types._stream_class.cache_clear()
    try:
        session = make()
        reply: Any = session.chat.completions.create(model="m", messages=[USER])
        message = reply.choices[0].message
        assert (message.role, message.content, message.tool_calls) == ("assistant", "ok 1", None)
        assert leyline_of(reply).version == 1
        data = {"content": None, "tool_calls": [{"id": "a", "index": None}], "refusal": None}
        light = types.ReplyObject(data)
        assert light.model_dump() == data
        assert light.model_dump(exclude_none=True) == {"tool_calls": [{"id": "a"}]}
        stream: Any = session.chat.completions.create(model="m", messages=[USER, message, USER], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ok 2"
        assert leyline_of(stream).receipt.drift_tokens == 0
        with pytest.raises(ConfigurationError, match=r"leyline-client\[openai\]"):
            _ = session.openai
    finally:
        types._stream_class.cache_clear()


def test_leyline_of_needs_a_finished_turn(make: Make) -> None:
    stream = make().chat.completions.create(model="m", messages=[USER], stream=True)
    with pytest.raises(ConfigurationError, match="read it to its end"):
        leyline_of(stream)
    with stream:
        pass


def test_errors_hold_no_prompt_text(make: Make, server: FakeServer) -> None:
    secret = [{"role": "user", "content": "SECRET"}]
    server.inject(Fault.OVERLOADED)
    for session in (make(max_retries=0), make(ScriptedPolicy([ValueError("boom")]))):
        with pytest.raises((ServerError, PolicyError)) as error:
            ask(session, secret)
        assert "SECRET" not in str(error.value)
