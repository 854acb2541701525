"""The recordings that ship with the package: complete, well-formed, and readable without debug-gym."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from leyline_evals.gym import DEFAULT_TASKS, OFFLINE_TASKS, load_recording, recorded_tasks
from leyline_evals.gym.recording import RecordingError, parse_recording, recording_path
from leyline_evals.gym.script import load_script


def test_every_offline_task_is_recorded() -> None:
    assert recorded_tasks() == OFFLINE_TASKS
    assert len(OFFLINE_TASKS) == 9
    assert len(DEFAULT_TASKS) == 8


def test_loading_needs_no_debug_gym() -> None:
    code = (
        "import sys; sys.modules['debug_gym'] = None; sys.modules['openai'] = None\n"
        "from leyline_evals.gym import load_recording\n"
        "print(sum(len(turn.messages) for turn in load_recording('config').turns()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 100


@pytest.mark.parametrize("task", OFFLINE_TASKS)
def test_recording_is_a_solved_trajectory(task: str) -> None:
    recording = load_recording(task)
    assert recording.resolved
    assert recording.score == recording.max_score == recording.steps[-1].score
    assert recording.steps[0].score < recording.max_score
    assert 10 <= len(recording.steps) <= 25
    assert [message["role"] for message in recording.messages] == ["system", "user"]
    names = [tool["function"]["name"] for tool in recording.tools]
    assert names == ["view", "grep", "bash", "pdb", "edit", "eval", "submit"]
    used = [step.assistant["tool_calls"][0]["function"]["name"] for step in recording.steps]
    assert set(used) <= set(names)
    assert used.count("view") >= 3
    assert used.count("pdb") >= 2
    assert used[-1] in ("eval", "submit")
    # Between about 3,000 and 7,000 tokens at four characters a token, tool schemas not counted.
    assert 12_000 <= len(json.dumps(recording.transcript(), ensure_ascii=False)) <= 30_000


@pytest.mark.parametrize("task", OFFLINE_TASKS)
def test_turns_rebuild_the_conversation(task: str) -> None:
    recording = load_recording(task)
    turns = list(recording.turns())
    for before, after in itertools.pairwise(turns):
        assert after.messages == [*before.messages, before.action, before.result]
    last = turns[-1]
    assert [*last.messages, last.action, last.result] == recording.transcript()
    ids = [turn.action["tool_calls"][0]["id"] for turn in turns]
    assert len(set(ids)) == len(ids)
    assert ids == [turn.result["tool_call_id"] for turn in turns]


@pytest.mark.parametrize("task", OFFLINE_TASKS)
def test_recording_follows_its_script(task: str) -> None:
    script = load_script(task)
    recording = load_recording(task)
    assert [step.assistant for step in recording.steps] == [
        script.assistant_message(turn) for turn in range(len(script.steps))
    ]


@pytest.mark.parametrize("task", OFFLINE_TASKS)
def test_file_round_trips_and_holds_nothing_volatile(task: str) -> None:
    text = recording_path(task).read_text(encoding="utf-8")
    recording = parse_recording(text)
    assert recording.to_jsonl() == text
    observations = "\n".join(step.tool["content"] for step in recording.steps)
    for volatile in ("/tmp/", "/home/", "/root", "leyline-", "site-packages/../", ".pyenv", "venv"):
        assert volatile not in observations
    assert "/testbed" in observations


def test_a_caller_may_change_what_turns_gives() -> None:
    recording = load_recording("purr")
    for turn in recording.turns():
        turn.messages.clear()
        turn.action["tool_calls"] = []
        turn.result["content"] = ""
    assert recording.to_jsonl() == recording_path("purr").read_text(encoding="utf-8")


def _lines() -> list[str]:
    return recording_path("purr").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("", "line 1"),
        ("\n".join(_lines()[1:]), "line 1"),
        ("\n".join(_lines()[:-1]), "turns were recorded"),
        ("\n".join([*_lines()[:3], "{", *_lines()[4:]]), "line 4: not JSON"),
        ("\n".join([*_lines()[:3], _lines()[4], _lines()[3], *_lines()[5:]]), "line 4: turn 2"),
        ("\n".join([*_lines()[:3], '{"kind": "turn"}', *_lines()[4:]]), "line 4: incomplete"),
        (_lines()[0].replace('"format": 1', '"format": 2') + "\n", "format 1"),
    ],
)
def test_broken_files_are_refused(broken: str, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        parse_recording(broken)


def test_missing_recording_names_the_others() -> None:
    with pytest.raises(RecordingError, match="there are config, counter"):
        load_recording("pandas_dataframe")
