"""What a policy sees: turns and ages, pairs, texts of every shape, and what stands."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_client._edits import apply_edits
from leyline_client.policy import Edit, MessageView, Part, Transcript
from leyline_client.policy._facts import FactsCache, message_key
from leyline_client.policy._spans import length, merged, subtract
from leyline_client.policy._tokens import TokenCounter
from leyline_client.testing._corpus import Message, corpus


def roles(*names: str) -> list[Message]:
    return [{"role": name, "content": f"{name} {number}"} for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "ages"),
    [
        ("system user", [0, 0]),
        ("system user assistant tool", [1, 1, 0, 0]),
        ("system user assistant tool assistant tool", [2, 2, 1, 1, 0, 0]),
        ("user assistant assistant tool assistant user", [2, 1, 1, 1, 0, 0]),
        ("user assistant tool assistant", [1, 0, 0, 0]),
        ("user assistant tool assistant assistant", [1, 0, 0, 0, 0]),
        ("assistant", [0]),
        ("", []),
    ],
)
def test_a_turn_begins_with_an_assistant_message(names: str, ages: list[int]) -> None:
    assert [view.age for view in Transcript(roles(*names.split()))] == ages


def test_system_messages_and_the_current_turn_are_protected_wherever_they_stand() -> None:
    transcript = Transcript(roles("system", "user", "assistant", "developer", "user", "assistant", "tool"))
    assert [view.protected for view in transcript] == [True, False, False, True, False, True, True]
    assert [view.index for view in transcript if view.is_task] == [4]


def call(id: str | None, name: str = "ls", arguments: str = "{}") -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_results_pair_with_the_nearest_call_of_their_id() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call("a", "first"), call("b", "second")]},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "assistant", "tool_calls": [call("a", "third", '{"x": 1}')]},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
        {"role": "tool", "tool_call_id": "c", "content": "?"},
    ]
    views = Transcript(messages).messages
    assert [view.tool for view in views] == ["", "second", "first", "", "third", ""]
    assert [view.group for view in views] == [0, 0, 0, 3, 3, 5]
    assert [views[0].answers, views[3].answers] == [(1, 2), (4,)]
    assert views[4].arguments == {"x": 1}
    assert views[5].call is None


def test_results_without_ids_answer_in_order() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [call(None, "first"), call(None, "second")]},
        *({"role": "tool", "content": "x"} for _ in range(3)),
        {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": "{}"}},
        {"role": "function", "name": "old", "content": "y"},
    ]
    assert [view.tool for view in Transcript(messages) if view.is_result] == ["first", "second", "", "old"]


@pytest.mark.parametrize(
    ("message", "text", "opaque"),
    [
        ({"role": "user", "content": "plain"}, "plain", 0),
        ({"role": "user", "content": None}, "", 0),
        ({"role": "user"}, "", 0),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab", 0),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "", 1),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}, "a", 1),
        ({"role": "user", "content": []}, "", 0),
    ],
)
def test_content_of_every_shape(message: Message, text: str, opaque: int) -> None:
    view = Transcript([message]).messages[0]
    assert (view.text, view.opaque) == (text, opaque)


@pytest.mark.parametrize(
    "message",
    [
        {"role": 7, "content": 3.5},
        {"content": {"a": [1, True]}},
        {"role": "assistant", "tool_calls": "no list"},
        {"role": "assistant", "tool_calls": [None, 3, {"function": None}, {"function": {"arguments": {"x": 1}}}]},
        {"role": "tool", "tool_call_id": ["list"], "content": ["a", None]},
        {},
    ],
)
def test_what_no_api_would_take_is_carried_and_never_edited(message: Message) -> None:
    transcript = Transcript([message, *roles("user", "assistant", "tool")])
    assert transcript.messages[0].tokens >= 0
    assert hash(message_key(message)) == hash(message_key(copy.deepcopy(message)))


def test_reply_objects_in_the_history_are_read_like_dicts() -> None:
    class Reply:
        def model_dump(self, **options: Any) -> Message:
            return {"role": "assistant", "content": "from an object"}

    assert Transcript([Reply(), *roles("user")]).messages[0].text == "from an object"
    with pytest.raises(TypeError, match="SimpleNamespace"):
        Transcript([SimpleNamespace(role="user")])


def test_a_policy_cannot_change_a_message_through_its_view() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [call("a")]}
    raw = Transcript([message]).messages[0].raw
    with pytest.raises(TypeError):
        raw["content"] = "x"  # type: ignore[index]
    with pytest.raises(TypeError):
        raw["content"][0]["text"] = "x"
    with pytest.raises(AttributeError):
        raw["tool_calls"].append(1)
    copied = Transcript([message]).messages[0].copy()
    copied["content"][0]["text"] = "changed"
    assert message["content"] == [{"type": "text", "text": "a"}]


def test_equal_messages_share_facts_and_changed_ones_do_not() -> None:
    cache = FactsCache(TokenCounter())
    message = {"role": "tool", "tool_call_id": "a", "content": "x" * 40}
    first = Transcript([message], cache=cache).messages[0].tokens
    assert (
        Transcript([dict(message)], cache=cache).messages[0]._facts
        is Transcript([message], cache=cache).messages[0]._facts
    )
    message["content"] = "y"
    assert Transcript([message], cache=cache).messages[0].tokens < first


@pytest.mark.parametrize(("left", "right"), [(1, True), (1, 1.0), (0, False), ("1", 1), (None, "None")])
def test_messages_that_python_calls_equal_are_told_apart(left: Any, right: Any) -> None:
    one, other = ({"role": "user", "content": [{"type": "x", "value": value}]} for value in (left, right))
    assert message_key(one) != message_key(other)


def test_the_cache_forgets_what_is_not_used_any_more() -> None:
    cache = FactsCache(TokenCounter(), max_chars=10_000)
    kept = {"role": "user", "content": "kept"}
    for number in range(200):
        cache.facts([kept, {"role": "user", "content": f"{number}".ljust(500)}])
    assert len(cache._young) + len(cache._old) <= 30
    assert cache.facts([kept])[0].size == 4


def standing_of(view: MessageView, *spans: tuple[int, int, str]) -> list[Edit]:
    return [Edit(message=view.index, start=start, end=end, replacement=text) for start, end, text in spans]


def test_a_cut_takes_what_is_left_and_keeps_the_stub_that_stands() -> None:
    messages = [
        *roles("user"),
        {"role": "assistant", "content": "0123456789" * 10},
        *roles("user", "assistant", "user"),
    ]
    plain = Transcript(messages).messages[1]
    assert [(e.start, e.end, e.replacement) for e in plain.cut(10, 30, "[gone]")] == [(10, 30, "[gone]")]
    assert plain.cut(10, 12, "[longer]") == []
    edited = Transcript(messages, standing=standing_of(plain, (20, 40, "[cut]"), (60, 70, ""))).messages[1]
    assert edited.now() == plain.text[:20] + "[cut]" + plain.text[40:60] + plain.text[70:]
    assert edited.free() == ((0, 20), (40, 60), (70, 100))
    assert [(e.start, e.end, e.replacement) for e in edited.cut(0, 100, "[gone]")] == [
        (0, 20, ""),
        (40, 60, ""),
        (70, 100, ""),
    ]
    assert edited.tokens - edited.tokens_now == 25 - TokenCounter().count(edited.now())


def test_clearing_without_a_stub_leaves_the_beginning_of_the_first_line() -> None:
    texts = [
        "short first line\n" + "x" * 500,
        "one two three four five six seven eight nine ten " * 20,
        "y" * 500,
        "\n\n  z\n" * 99,
    ]
    messages = [
        *roles("user"),
        *({"role": "assistant", "content": text} for text in texts),
        *roles("user", "assistant", "tool"),
    ]
    left = [apply_edits(messages, view.clear())[view.index]["content"] for view in Transcript(messages).messages[1:5]]
    assert left == ["short first line", "one two three four five six seven eight", "y" * 40, "\n\n  z"]


def test_tokens_follow_the_edits() -> None:
    for messages in corpus(30):
        plain = Transcript(messages)
        edits = [edit for view in plain if not view.protected for edit in view.clear("[x]")]
        assert plain.with_edits(edits).tokens == plain.tokens - plain.gain(edits)
        assert plain.with_edits(edits).tokens == Transcript(messages, standing=edits).tokens
        assert plain.tokens == sum(view.tokens for view in plain)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda s: (s[0], s[0] + s[1])), max_size=6)


@given(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda s: (s[0], s[0] + s[1])), spans)
def test_span_arithmetic_is_that_of_sets(span: tuple[int, int], covered: list[tuple[int, int]]) -> None:
    taken = {n for low, high in covered for n in range(low, high)}
    joined = merged(covered)
    assert {n for low, high in joined for n in range(low, high)} == taken
    left = subtract(span, joined)
    assert [n for low, high in left for n in range(low, high)] == [n for n in range(*span) if n not in taken]
    assert length(left) == len(set(range(*span)) - taken)
    assert list(left) == sorted(left)


def test_an_insertion_that_stands_is_not_cut_over() -> None:
    messages = [*roles("user"), {"role": "assistant", "content": "abcdef"}, *roles("user", "assistant", "user")]
    standing = [Edit(message=1, start=3, end=3, replacement="XYZ")]
    new = Transcript(messages, standing=standing).messages[1].replace(0, 6, "-")
    assert apply_edits(messages, [*standing, *new])[1]["content"] == "XYZ"


def test_edits_survive_pickling_with_their_part() -> None:
    edit = Edit(message=1, part=Part.REASONING, replacement="x")
    assert pickle.loads(pickle.dumps(edit)) == edit
