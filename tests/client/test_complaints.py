"""Kinds of fault that users of other systems report, each as a test of the whole kind on the session's side.

The policies' side (orphaned calls, clearing every turn, clearing the current task) is in ``tests/policies``.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyline_client import Executed, LeylineSession, LeylineWarning, Reason, ServerError, Unsupported, _errors
from leyline_client.testing import FakeServer, tool_call
from leyline_client.testing._faults import FakeReply
from tests.client.loops import SYSTEM, TOOLS, history

TEXT = st.text(alphabet="ab1 \n\té{}\"'", max_size=20)
REPLY = st.one_of(
    TEXT.filter(str.strip),
    st.builds(
        lambda text, arguments: {"content": text, "tool_calls": [tool_call("read", a) for a in arguments]},
        st.none() | TEXT,
        st.lists(st.dictionaries(TEXT, st.integers() | TEXT, max_size=2), min_size=1, max_size=3),
    ),
)


def replayed(message: Any, style: str) -> dict[str, Any]:
    """A reply as different frameworks send it back."""
    plain: dict[str, Any] = message.model_dump(exclude_unset=True)
    if style == "object":
        return message  # type: ignore[no-any-return]
    if style == "reserialised":
        for call in plain.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
    if style == "stripped" and isinstance(plain.get("content"), str):
        plain["content"] = plain["content"].strip()
    return plain


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(
    replies=st.lists(REPLY, min_size=2, max_size=5),
    style=st.sampled_from(["object", "plain", "reserialised", "stripped"]),
    stream=st.booleans(),
)
def test_4_and_6_text_that_tokenises_two_ways_never_costs_the_cache_and_reuse_never_stops(
    replies: list[Any], style: str, stream: bool
) -> None:
    with (
        FakeServer(replies) as server,
        LeylineSession(
            "http://fake", policies=["truncate-older-than-n:n=1,max_chars=5"], transport=server.transport
        ) as session,
    ):
        messages: list[Any] = [SYSTEM, {"role": "user", "content": "go"}]
        for _ in replies:
            create: Any = session.chat.completions.create
            if stream:
                from openai.lib.streaming.chat import ChatCompletionStreamState

                state: Any = ChatCompletionStreamState()
                for chunk in create(model="m", messages=messages, tools=TOOLS, stream=True):
                    state.handle_chunk(chunk)
                message = state.get_final_completion().choices[0].message
                message = type(message).construct(**{k: v for k, v in message.model_dump().items() if v is not None})
            else:
                message = create(model="m", messages=messages, tools=TOOLS).choices[0].message
            calls = message.tool_calls or ()
            messages = [*messages, replayed(message, style)]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "result " * 20} for call in calls]
            if not calls:
                messages.append({"role": "user", "content": "go on"})
        receipts = session.receipts
        assert {receipt.executed for receipt in receipts} <= {Executed.APPEND, Executed.AMORTIZE}
        assert all(receipt.drift_tokens == 0 for receipt in receipts)
        for before, after in itertools.pairwise(receipts):
            evicted = sum(d.end - d.start for d in after.directives)
            assert after.cached_tokens >= before.prompt_tokens - evicted > 0


def unpaired(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Ids of calls without all their results, and of results without their call, in the place where they belong."""
    calls = [c["id"] for m in messages if m["role"] == "assistant" for c in m.get("tool_calls") or ()]
    results = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    return set(calls) ^ set(results)


REMOVING = "token-budget:trigger=400,target=200,keep_first=0,keep_last=1"


@pytest.mark.parametrize("policy", [REMOVING, "truncate-older-than-n:n=1,max_chars=20"])
@pytest.mark.parametrize("cut", range(2, 12))
def test_1_a_history_that_the_agent_slices_anywhere_loses_no_half_of_an_exchange_through_us(
    policy: str, cut: int
) -> None:
    """Agents keep the newest k messages, wherever that cuts; what was unpaired then is all that ever is."""
    with FakeServer() as server, LeylineSession("http://f", policies=[policy], transport=server.transport) as session:
        for turns in range(1, 6):
            session.chat.completions.create(model="m", messages=history(turns))
        assert session.stats.edits > 0
        for turns in range(6, 9):
            sliced = [*history(turns)[:2], *history(turns)[2 + cut :]]
            session.chat.completions.create(model="m", messages=sliced)
            assert unpaired(server.turns[-1].messages) <= unpaired(sliced)
    assert session.stats.turns == 8


@pytest.mark.parametrize("stream", [False, True], ids=["reply", "stream"])
@pytest.mark.parametrize(("report", "warned"), [(True, False), (False, True)])
def test_8_zero_cached_tokens_and_a_missing_cache_report_are_told_apart(
    report: bool, warned: bool, stream: bool
) -> None:
    server = FakeServer(extension=False, cache_report=report)
    with LeylineSession("http://fake", strategy="fallback", transport=server.transport) as session:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for turns in range(3):
                reply: Any = session.chat.completions.create(model="m", messages=history(turns), stream=stream)
                assert not stream or list(reply)
        assert all(issubclass(warning.category, LeylineWarning) for warning in said)
        assert session.receipts[0].cached_tokens == 0
        assert all(receipt.cached_tokens is not None for receipt in session.receipts)
        assert any("--enable-cache-report" in str(warning.message) for warning in said) is warned


REFUSALS = [cls for cls in _errors.SERVER_ERRORS.values() if cls is not ServerError]


@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.code)
def test_9_every_refusal_arrives_as_its_own_type_with_field_and_detail(kind: type[ServerError]) -> None:
    refusal = kind("because", param="leyline.edits[2].end", detail={"version": 99, "reason": "x"})
    with LeylineSession("http://fake", max_retries=0, transport=FakeServer([refusal]).transport) as session:
        with pytest.raises(kind) as error:
            session.chat.completions.create(model="m", messages=history(1))
        assert type(error.value) is kind or kind is _errors.UpstreamError
        assert (error.value.param, error.value.detail["reason"]) == ("leyline.edits[2].end", "x")
        assert error.value.http_status == kind.status


class Recorded(FakeServer):
    """Keeps the bodies of the turns that were asked for."""

    def __init__(self, replies: Sequence[Any]) -> None:
        super().__init__(replies)
        self.asked: list[tuple[str, bytes]] = []

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> FakeReply:
        if method == "POST":
            self.asked.append((target, body))
        return super().handle(method, target, headers, body)


MENDED = {
    ("strict", "unknown_session"),
    ("fallback", "unknown_session"),
    ("fallback", "unsupported"),
    ("fallback", "internal_error"),
}
"""Strategy and refusal after which another request makes sense. A 503 asks for the same one again, later."""


@pytest.mark.filterwarnings("ignore::leyline_client.LeylineWarning")
@pytest.mark.parametrize("strategy", ["strict", "fallback"])
@pytest.mark.parametrize("kind", REFUSALS, ids=lambda kind: kind.code)
def test_9_after_a_refusal_there_is_one_try_that_differs_or_none(kind: type[ServerError], strategy: Any) -> None:
    server = Recorded(["ok", kind("because"), "fine"])
    with LeylineSession("http://f", strategy=strategy, max_retries=0, transport=server.transport) as session:
        session.chat.completions.create(model="m", messages=history(1))
        server.asked.clear()
        if (strategy, kind.code) in MENDED:
            session.chat.completions.create(model="m", messages=history(2))
            first, second = server.asked
            assert first != second
        else:
            with pytest.raises(ServerError) as error:
                session.chat.completions.create(model="m", messages=history(2))
            assert str(error.value)
            assert len(server.asked) == 1


def test_9_a_refusal_names_what_was_left_out() -> None:
    with FakeServer([Unsupported("no images"), "fine"]) as server:
        with LeylineSession("http://fake", strategy="fallback", transport=server.transport) as session:
            with pytest.warns(LeylineWarning, match="no images"):
                session.chat.completions.create(model="m", messages=history(1))
            assert session.last is not None
            assert session.last.reason is Reason.UNSUPPORTED_REQUEST
        paths = [path for method, path in server.requests if method == "POST"]
        assert paths == ["/leyline/v1/chat/completions", "/v1/chat/completions"]
