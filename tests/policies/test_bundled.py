"""What each bundled policy does, on conversations small enough to read."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from tool_loops import START, Message, Run, call, reading, text, turn

from leyline_client._edits import apply_edits
from leyline_client._errors import PolicyError, PolicyRegistrationError
from leyline_client.policy import Edit, Mode, Part, PolicySpec, resolve

LONG = text("long", 600)


def sent(spec: PolicySpec, *turns: list[Message], start: list[Message] = START) -> list[Message]:
    """The conversation as edited after its last turn, planned from scratch."""
    messages = [*start, *itertools.chain(*turns)]
    return apply_edits(messages, resolve([spec]).plan(messages))


def contents(messages: list[Message]) -> list[Any]:
    return [one["content"] for one in messages if one["role"] == "tool"]


def read(id: str, path: str, result: str, **more: Any) -> list[Message]:
    return turn([call(id, "read_file", path=path, **more)], [result])


def other(id: str, result: str = "ok") -> list[Message]:
    return turn([call(id, "bash", command=f"echo {id}")], [result])


# stale-tool-detector

STALE = "stale-tool-detector:min_chars=1"
GONE = "[stale output removed]"
A, B = text("version a", 300), text("version b", 300)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param([read("1", "f", A), read("2", "f", B), other("3")], [GONE, B, "ok"], id="read again"),
        pytest.param(
            [read("1", "f", A), read("2", "./f", B), other("3")], [GONE, B, "ok"], id="same path, other spelling"
        ),
        pytest.param(
            [read("1", "f", A), read("2", "f", B, start=1), other("3")], [A, B, "ok"], id="later read is partial"
        ),
        pytest.param(
            [read("1", "f", A, start=1), read("2", "f", B), other("3")], [GONE, B, "ok"], id="earlier is partial"
        ),
        pytest.param(
            [read("1", "f", A, start=1), read("2", "f", B, start=1), other("3")], [GONE, B, "ok"], id="same part twice"
        ),
        pytest.param(
            [read("1", "f", A), read("2", "f", "Error: busy"), other("3")], [A, "Error: busy", "ok"], id="fails"
        ),
        pytest.param([read("1", "f", A), read("2", "f", B)], [A, B], id="the current turn does not count yet"),
        pytest.param([read("1", "f", A), read("2", "g", B), other("3")], [A, B, "ok"], id="another file"),
        pytest.param(
            [read("1", "f", A), turn([call("2", "edit_file", path="f", new="x")], ["done"]), other("3")],
            [GONE, "done", "ok"],
            id="edited since",
        ),
        pytest.param(
            [read("1", "f", A), turn([call("2", "edit_file", path="f", new="x")], ["Error: no"]), other("3")],
            [A, "Error: no", "ok"],
            id="edit failed",
        ),
        pytest.param(
            [
                turn([call("1", "editor", command="view", path="f")], [A]),
                turn([call("2", "editor", command="str_replace", path="f", old="a")], ["done"]),
                other("3"),
            ],
            [GONE, "done", "ok"],
            id="one tool for everything",
        ),
        pytest.param(
            [
                turn([call("1", "bash", command="pytest -q")], ["Traceback: " + LONG]),
                turn([call("2", "bash", command="pytest -q")], ["3 passed"]),
                other("3"),
            ],
            [GONE, "3 passed", "ok"],
            id="failed, then retried",
        ),
        pytest.param(
            [turn([call("1", "bash", command="pytest -q")], ["Traceback: " + LONG]), other("2"), other("3")],
            ["Traceback: " + LONG, "ok", "ok"],
            id="failed, not retried",
        ),
        pytest.param([other("1", LONG), other("1", LONG), other("3")], [GONE, LONG, "ok"], id="same call, same output"),
    ],
)
def test_stale(turns: list[list[Message]], expected: list[str]) -> None:
    assert contents(sent(STALE, *turns)) == expected


@pytest.mark.parametrize("off", ["superseded_reads", "edited_since", "failed_retries", "duplicates"])
def test_stale_kinds_can_be_switched_off(off: str) -> None:
    cases = {
        "superseded_reads": [read("1", "f", A), read("2", "f", B)],
        "edited_since": [read("1", "f", A), turn([call("2", "edit_file", path="f")], ["done"])],
        "failed_retries": [turn([call("1", "run", x=1)], ["Error: " + A]), turn([call("2", "run", x=1)], ["fine"])],
        "duplicates": [other("1", LONG), other("1", LONG)],
    }
    for kind, turns in cases.items():
        edited = contents(sent(f"{STALE},{off}=false", *turns, other("9")))
        assert (GONE in edited) is (kind != off)


# clear-tool-uses


def test_clear_tool_uses_clears_all_but_the_newest() -> None:
    edited = sent("clear-tool-uses:trigger=500,keep=2,exclude_tools=bash", other("0", LONG), *reading(5, 600))
    assert [content == "[cleared]" for content in contents(edited)] == [False, True, True, True, False, False]
    assert json.loads(edited[4]["tool_calls"][0]["function"]["arguments"]) == {"path": "src/file_0.py"}


def test_clear_tool_uses_can_clear_the_inputs_too() -> None:
    edited = sent("clear-tool-uses:trigger=500,keep=2,clear_tool_inputs=true", *reading(5, 600))
    assert [one["tool_calls"][0]["function"]["arguments"] for one in edited if one["role"] == "assistant"][:3] == [
        "{}"
    ] * 3


def test_clear_tool_uses_waits_for_its_trigger_and_for_enough() -> None:
    assert resolve(["clear-tool-uses:trigger=5000"]).plan([*START, *itertools.chain(*reading(5, 600))]) == []
    few = [*START, *itertools.chain(*reading(4, 600))]
    assert resolve(["clear-tool-uses:trigger=500,keep=3,clear_at_least=10000"]).plan(few) == []
    assert len(resolve(["clear-tool-uses:trigger=500,keep=3"]).plan(few)) == 1


def test_without_a_stub_a_clearing_is_a_pure_deletion_that_leaves_something() -> None:
    messages = [*START, *itertools.chain(*reading(5, 600))]
    edits = resolve(['clear-tool-uses:trigger=500,keep=2,stub=""']).plan(messages)
    assert edits
    assert all(edit.replacement == "" for edit in edits)
    assert all(content for content in contents(apply_edits(messages, edits)))


# clear-thinking


def test_clear_thinking_keeps_the_newest() -> None:
    edited = sent("clear-thinking", *reading(4, 50))
    assert [one["reasoning_content"] for one in edited if one["role"] == "assistant"] == ["", "", "", "Let me look."]
    assert len(resolve(["clear-thinking:keep=3"]).plan([*START, *itertools.chain(*reading(4, 50))])) == 1


def test_clear_thinking_cuts_tags_and_leaves_no_empty_message() -> None:
    said = ["<think>hmm</think>\nAnswer.", "<think>only this</think>", "Nothing.", "<think>a</think>b<think>c</think>"]
    start = [one for word in said for one in ({"role": "user", "content": "q"}, {"role": "assistant", "content": word})]
    edited = sent("clear-thinking:keep=0", start=[*start, *START, *next(reading(1))])
    assert [one["content"] for one in edited[1:8:2]] == ["Answer.", "<think></think>", "Nothing.", "b"]


# last-n-observations


@pytest.mark.parametrize(
    ("polling", "cleared"),
    [(1, [0, 0, 1, 2, 3, 4, 5, 6]), (3, [0, 0, 1, 1, 1, 4, 4, 4]), (4, [0, 0, 0, 2, 2, 2, 2, 6])],
)
def test_last_n_observations_polls(polling: int, cleared: list[int]) -> None:
    counts = []
    for number in range(1, 9):
        edited = contents(sent(f"last-n-observations:n=2,polling={polling}", *reading(number, 200)))
        counts.append(sum(str(content).startswith("Old environment output: (") for content in edited))
    assert counts == cleared


def test_last_n_observations_tags_and_users() -> None:
    turns = [other("1", LONG), read("2", "f", LONG), other("3", LONG), read("4", "g", LONG)]
    edited = contents(sent("last-n-observations:n=1,always_keep=read_file,always_remove=ba*", *turns))
    lines = len(LONG.splitlines())
    old = f"Old environment output: ({lines} lines omitted)"
    assert edited == [old, LONG, old, LONG]
    chat = [*START]
    for number in range(4):
        chat += [{"role": "assistant", "content": f"ls {number}"}, {"role": "user", "content": LONG}]
    edits = resolve([("last-n-observations", {"n": 1, "roles": ["user"]})]).plan(chat)
    assert [edit.message for edit in edits] == [3, 5, 7]


# ephemeral-tags


def tagged(inner: str, attribute: str = "") -> str:
    return f"<ephemeral_observation{attribute}>{inner}</ephemeral_observation>"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"keep {tagged('x' * 50)} this", "keep  this"),
        (tagged("all of it"), tagged("")),
        (f"a {tagged('x ' + tagged('y') + ' z')} b", "a  b"),
        ("a <ephemeral_observation>never closed", "a <ephemeral_observation>never closed"),
        ("a </ephemeral_observation> b", "a </ephemeral_observation> b"),
        ("later " + tagged("x" * 50, ' ttl="9"'), "later " + tagged("x" * 50, ' ttl="9"')),
        (f"{tagged('one' * 20)}{tagged('two' * 20)} rest", " rest"),
    ],
)
def test_ephemeral_tags(before: str, after: str) -> None:
    assert contents(sent("ephemeral-tags", other("1", before), other("2")))[0] == after
    assert contents(sent("ephemeral-tags", other("1", before)))[0] == before
    assert contents(sent("ephemeral-tags:ttl=2", other("1", before), other("2")))[0] == before


# token-budget


def test_token_budget_drops_the_oldest_turns_down_to_its_target() -> None:
    run = Run(resolve(["token-budget:trigger=1000,target=600,keep_first=1,keep_last=1"]))
    for messages in reading(12, 600):
        run.messages += messages
        before = run.tokens
        if run.send():
            assert before >= 1000
            assert run.tokens <= 600
    numbers = [content.split(" line")[0] for content in contents(run.sent)]
    assert numbers[0] == "file 0"
    assert numbers[1:] == [f"file {n}" for n in range(13 - len(numbers), 12)]
    assert all(edit.part is Part.MESSAGE for edit in run.standing)


def test_token_budget_drops_an_exchange_that_is_over_as_a_whole() -> None:
    old = [
        {"role": "user", "content": "first question"},
        *next(reading(1, 3_000)),
        {"role": "assistant", "content": "first answer"},
    ]
    edited = sent("token-budget:trigger=500,target=100,keep_first=0,keep_last=0", start=[START[0], *old, START[1]])
    assert [one["role"] for one in edited] == ["system", "user", "assistant", "user"]
    messages = [START[0], *old, START[1], *next(reading(1, 50))]
    edits = resolve(["token-budget:trigger=500,target=100,keep_first=0,keep_last=0"]).plan(messages)
    assert [edit.message for edit in edits] == [1, 2, 3, 4]


def test_token_budget_can_keep_the_messages_and_empty_them() -> None:
    edited = sent("token-budget:trigger=800,target=300,keep_first=0,keep_last=1,style=stub", *reading(6, 600))
    assert len(edited) == 14
    assert contents(edited)[:3] == ["[dropped]"] * 3


# redact

SECRET = "sk-" + "a1B2c3D4e5F6g7H8i9J0k"


def test_redact_forgets_secrets_wherever_they_are() -> None:
    leak = turn([call("1", "bash", command=f"export KEY={SECRET}")], [f"KEY={SECRET} set"], reasoning_content=SECRET)
    messages = [START[0], {"role": "user", "content": f"use {SECRET}"}, *leak, *next(reading(1))]
    edits = resolve(["redact"]).plan(messages)
    edited = apply_edits(messages, edits)
    assert SECRET not in json.dumps(edited)
    assert {edit.mode for edit in edits} == {Mode.FORGET}
    assert edited[3]["content"] == "KEY=[redacted] set"
    assert json.loads(edited[2]["tool_calls"][0]["function"]["arguments"]) == {"command": "export KEY=[redacted]"}


def test_redact_waits_until_the_model_has_answered() -> None:
    messages = [*START, *turn([call("1", "env")], [SECRET])]
    assert resolve(["redact"]).plan(messages) == []


def test_redact_takes_all_arguments_where_a_match_spans_their_syntax() -> None:
    messages = [*START, *turn([call("1", "env", a="x", b="y")], ["ok"]), *next(reading(1))]
    edits = resolve([("redact", {"patterns": [r'"a": "x", "b"']})]).plan(messages)
    assert apply_edits(messages, edits)[2]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("patterns", [["("], [""], ["x*"]])
def test_redact_refuses_patterns_that_are_none(patterns: list[str]) -> None:
    with pytest.raises(PolicyRegistrationError, match="patterns"):
        resolve([("redact", {"patterns": patterns})])


# attention-mass


def test_attention_mass_clears_what_was_ignored_long_enough() -> None:
    messages = [*START, *itertools.chain(*reading(6))]
    mass = [[0.2, 0.0, 0.0, 0.0]] * len(messages)
    mass[3] = [0.0, 0.0, 0.0, 0.01]
    mass[5] = [0.0, 0.0]
    edits = resolve(["attention-mass"]).plan(messages, attention=mass)
    assert [edit.message for edit in edits] == [7]


# transform


def without_old_turns(messages: list[Message]) -> list[Message]:
    return [*messages[:2], *messages[-4:]]


def test_transform_turns_left_out_messages_into_removals() -> None:
    messages = [*START, *itertools.chain(*reading(5))]
    edits = resolve([("transform", {"function": without_old_turns, "mode": "forget"})]).plan(messages)
    assert apply_edits(messages, edits) == without_old_turns(messages)
    assert {edit.mode for edit in edits} == {Mode.FORGET}


def test_transform_edits_lines_not_whole_texts() -> None:
    def change(history: list[Message]) -> list[Message]:
        lines = history[3]["content"].splitlines(keepends=True)
        history[3]["content"] = "".join([*lines[:5], "CHANGED\n", *lines[6:40], *lines[45:]])
        return history

    messages = [*START, *itertools.chain(*reading(2, 2_000))]
    edits = resolve([("transform", {"function": change})]).plan(messages)
    assert len(edits) == 2
    assert sum(len(edit.replacement) for edit in edits) < 10
    assert apply_edits(messages, edits)[3] == change([dict(one) for one in messages])[3]


@pytest.mark.parametrize(
    "function",
    [
        lambda messages: [*messages, {"role": "user", "content": "new"}],
        lambda messages: [*messages[:2], {"role": "user", "content": "summary"}, *messages[6:]],
        lambda messages: [messages[1], messages[0], *messages[2:]],
    ],
    ids=["appends", "inserts", "reorders"],
)
def test_transform_refuses_what_edits_cannot_say(function: Any) -> None:
    with pytest.raises(PolicyError, match="transform"):
        resolve([("transform", {"function": function})]).plan([*START, *itertools.chain(*reading(5))])


def test_transform_leaves_changes_to_protected_messages_out() -> None:
    def shout(history: list[Message]) -> list[Message]:
        return [{**one, "content": str(one["content"]).upper()} for one in history]

    messages = [*START, *itertools.chain(*reading(2, 100))]
    edited = apply_edits(messages, resolve([("transform", {"function": shout})]).plan(messages))
    assert [edited[0], *edited[-2:]] == [messages[0], *messages[-2:]]
    assert edited[3]["content"] == messages[3]["content"].upper()


def test_transform_loads_a_function_by_name() -> None:
    assert resolve(["transform:function=leyline_policies.transform:short_results"])
    with pytest.raises(PolicyRegistrationError, match="cannot import"):
        resolve(["transform:function=leyline_policies.transform:nothing"])


# tiered


def test_tiered_goes_up_the_tiers() -> None:
    asked: list[str] = []

    def summarise(old: str) -> str:
        asked.append(old)
        return f"summary {len(asked)}"

    policy = {
        "trigger": 900,
        "summarise_trigger": 1_400,
        "summarise": summarise,
        "keep_last": 1,
        "drop": ["clear-thinking"],
    }
    run = Run(resolve([("tiered", {**policy, "clear_at_least": 1})]))
    stages = []
    for messages in reading(12, 600):
        run.messages += messages
        new = run.send()
        stages.append("summary" if any(e.replacement for e in new) else "drop" if new else "")
    assert stages[:4] == ["", "", "", ""]
    assert "drop" in stages
    assert "summary" in stages
    assert stages.index("drop") < stages.index("summary")
    assert [content for content in contents(run.sent) if content.startswith("summary")] == [
        f"summary {n}" for n in range(1, len(asked) + 1)
    ]
    assert len(asked) == stages.count("summary"), "a summary is made once, though a plan is asked for twice"


def test_tiered_makes_no_room_for_a_summary_that_fits_nowhere() -> None:
    """Nothing of the old turns goes before the summary that stands for them has a place."""
    messages = [*START, *itertools.chain(*reading(12, 600))]
    policy = {"trigger": 900, "summarise_trigger": 1_400, "keep_last": 1, "drop": ["clear-thinking"]}
    long = resolve([("tiered", {**policy, "summarise": lambda _: "x" * 10_000})]).plan(messages)
    short = resolve([("tiered", {**policy, "summarise": lambda _: "x"})]).plan(messages)
    dropped = resolve(["clear-thinking"]).plan(messages)
    assert long in ([], dropped)
    assert len(short) > len(dropped)
    assert [edit.replacement for edit in short if edit.replacement] == ["x"]


def test_tiered_puts_the_summary_where_it_is_shorter_than_what_it_replaces() -> None:
    """The first result is shorter than the summary, the second is not."""
    first, second, *rest = reading(12, 600)
    short = [*first[:-1], {**first[-1], "content": "ok"}]
    messages = [*START, *itertools.chain(short, second, *rest)]
    policy = {"trigger": 900, "summarise_trigger": 1_400, "keep_last": 1, "drop": ["clear-thinking"]}
    summary = "what was read so far"
    edits = resolve([("tiered", {**policy, "summarise": lambda _: summary})]).plan(messages)
    assert [messages[edit.message] for edit in edits if edit.replacement] == [second[-1]]


def test_tiered_without_a_function_only_drops() -> None:
    edits = resolve(["tiered:trigger=900,summarise_trigger=1000"]).plan([*START, *itertools.chain(*reading(12, 600))])
    assert {edit.replacement for edit in edits} == {"\n[... truncated ...]\n"}


def test_tiered_names_the_policy_inside_that_is_wrong() -> None:
    with pytest.raises(PolicyRegistrationError) as caught:
        resolve([("tiered", {"drop": ["truncate-older-than-n:n=0"]})])
    assert caught.value.policy == "truncate-older-than-n"


# truncate-older-than-n


def test_truncate_cuts_at_lines_and_words() -> None:
    lines = "".join(f"line number {n} of the output\n" for n in range(100))
    edited = str(contents(sent("truncate-older-than-n:n=1,max_chars=200", other("1", lines), other("2")))[0])
    head, tail = edited.split("\n[... truncated ...]\n")
    assert lines.startswith(head + "\n")
    assert lines.endswith("\n" + tail.lstrip("\n"))
    words = "word " * 200
    head = str(contents(sent("truncate-older-than-n:n=1,max_chars=99", other("1", words), other("2")))[0]).split("\n")[
        0
    ]
    assert head.endswith("word")


def test_truncate_zero_characters_without_a_stub_leaves_the_first_line() -> None:
    edited = contents(sent('truncate-older-than-n:n=1,max_chars=0,stub=""', other("1", LONG), other("2")))
    assert edited[0] == LONG.splitlines()[0]


def test_policies_see_what_the_ones_before_them_did() -> None:
    messages = [*START, *itertools.chain(*reading(6, 600))]
    both = resolve(["truncate-older-than-n:n=1,max_chars=100", "clear-tool-uses:trigger=1200,keep=1"])
    alone = resolve(["truncate-older-than-n:n=1,max_chars=100"])
    assert both.plan(messages) == alone.plan(messages)
    assert resolve(["clear-tool-uses:trigger=500,keep=1"]).plan(messages)


def test_more_edits_than_the_protocol_takes_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(resolve(["truncate-older-than-n:n=1,max_chars=10"]))
    run.standing = [Edit(message=3, start=n, end=n + 1) for n in range(0, 2 * 1023, 2)]
    run.messages += [one for messages in reading(4, 3_000) for one in messages]
    assert run.send() == []
    assert "limit" in caplog.text
