"""The runner against a fake OpenAI-compatible server: every offline task solved in every arm, resuming, failing.

Run in the debug-gym environment: ``pytest tests/evals/gym_*.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline_evals.gym import OFFLINE_TASKS, load_recording
from leyline_evals.gym.env import RUN_MARKER
from leyline_evals.gym.llm import ServerDownError
from leyline_evals.gym.processes import kill_marked, run_in_child
from leyline_evals.gym.recorder import UnsolvedError, _record_here, record_confined
from leyline_evals.gym.recording import Recording, recording_path
from leyline_evals.gym.results import RunResult, SettingsChangedError, read_run, read_runs
from leyline_evals.gym.run import Options, run_debug_gym
from leyline_evals.gym.script import Script, Step, load_script
from leyline_evals.gym.testing import FakeChatServer, stubbing_session

FIX = {"path": "purr_code.py", "start": 27, "end": 27, "new_code": "        if 10 < self.hunger <= 20:"}


def quick(task: str) -> Script:
    """Solves purr in two steps."""
    assert task == "purr"
    return Script(task, (Step("Fix it.", "edit", FIX), Step("Done.", "submit", {"message": "fixed"})))


@pytest.fixture
def server() -> Iterator[FakeChatServer]:
    with FakeChatServer() as running:
        yield running


@pytest.fixture(scope="module")
def everything(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[RunResult], list[dict[str, Any]], list[str]]:
    """All offline tasks in one arm that edits, and one in the arm that does not."""
    out = tmp_path_factory.mktemp("everything")
    lines: list[str] = []
    options = Options(keep_transcripts=True)
    with FakeChatServer() as running:
        common = {"out": out, "script": load_script, "session_factory": stubbing_session, "options": options}
        results = run_debug_gym(
            running.url, OFFLINE_TASKS, ["truncate+amortize"], workers=3, progress=lines.append, **common
        )
        run_debug_gym(running.url, ["purr"], ["keep-all"], workers=1, progress=lines.append, **common)
        return out, results, running.bodies, lines


def test_every_offline_task_is_resolved_through_the_server(everything: Any) -> None:
    _, results, bodies, lines = everything
    assert {result.key.task for result in results} == set(OFFLINE_TASKS)
    assert all(result.resolved for result in results), lines
    assert all(result.end["confinement"] != "off" for result in results)
    steps = sum(len(load_recording(task).steps) for task in OFFLINE_TASKS)
    assert sum(body["arm"] == "truncate+amortize" for body in bodies) == steps
    assert all(body["max_tokens"] == 1 and body["tools"] for body in bodies)


@pytest.mark.parametrize("task", OFFLINE_TASKS)
def test_live_run_is_the_recording(everything: Any, task: str) -> None:
    """The same tool outputs, byte for byte, although one arm's prompts were edited on the way."""
    recording = load_recording(task)
    if recording.python != platform.python_version():
        pytest.skip(f"recorded with Python {recording.python}; tracebacks and pdb differ between releases")
    out, _, _, _ = everything
    path = out / "truncate+amortize" / f"{task}.s0.transcript.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == recording.transcript()


def test_steps_are_measured_and_hold_no_text(everything: Any) -> None:
    out, results, _, _ = everything
    purr = next(result for result in results if result.key.task == "purr")
    assert [step["turn"] for step in purr.steps] == list(range(len(load_recording("purr").steps)))
    for step in purr.steps:
        assert step["prompt_tokens"] > step["cached_tokens"] > 0
        assert step["ttft_ms"] == step["total_ms"] > 0
        assert step["leyline"] == {
            "version": 1,
            "receipt": {"prefilled_tokens": step["prompt_tokens"] - step["cached_tokens"]},
        }
        assert step["attempts"] == 1
    kept = read_run(out / "keep-all" / "purr.s0.jsonl")
    assert kept is not None
    assert kept.steps[-1]["prompt_tokens"] > 1.5 * purr.steps[-1]["prompt_tokens"]
    raw = (out / "truncate+amortize" / "purr.s0.jsonl").read_text()
    assert "Meow" not in raw
    assert "secret-session-id" not in raw


def test_request_prefixes_never_change_in_keep_all(everything: Any) -> None:
    _, _, bodies, _ = everything
    sent = [body["messages"] for body in bodies if body["arm"] == "keep-all"]
    assert len(sent) == len(load_recording("purr").steps)
    for before, after in itertools.pairwise(sent):
        assert after[: len(before)] == before


def test_two_recordings_are_byte_identical() -> None:
    shipped = load_recording("purr")
    first = record_confined("purr", shipped.recorded).to_jsonl()
    if shipped.python == platform.python_version():
        assert first == recording_path("purr").read_text(encoding="utf-8")
    else:
        assert first == record_confined("purr", shipped.recorded).to_jsonl()


def _record(script: Script, folder: Path) -> Recording:
    return run_in_child(_record_here, script, folder, "2020-01-01")


def test_a_script_that_does_not_solve_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(UnsolvedError, match="0 of 1 tests"):
        _record(Script("purr", (Step("Look.", "eval", {}),)), tmp_path)


def test_a_task_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "run", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "file").write_text("precious")
    commands = [
        f"echo x > {outside}/new",
        f"rm -f {outside}/file",
        f"python -c \"open('{outside}/file', 'w')\"",
        "echo x > ../../outside/new",
        "echo x > ~/inside-home && echo x > $TMPDIR/inside-tmp && cat ~/inside-home",
    ]
    steps = [Step("Try.", "bash", {"command": command}) for command in commands]
    steps.append(Step("Try.", "edit", {"path": f"{outside}/new.py", "new_code": "x"}))
    recording = _record(Script("purr", (*steps, *quick("purr").steps)), inside)
    answers = [step.tool["content"] for step in recording.steps]
    assert all("Permission denied" in answer or "Read-only" in answer for answer in answers[:4]), answers
    assert answers[4] == "x"
    assert "is not in the subpath of" in answers[5]
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "precious"


def test_finished_runs_are_not_repeated_and_torn_ones_are(server: FakeChatServer, tmp_path: Path) -> None:
    common = {"script": quick, "session_factory": stubbing_session, "out": tmp_path, "progress": lambda _: None}
    run_debug_gym(server.url, ["purr"], ["keep-all"], seeds=[0, 1], **common)
    assert len(server.bodies) == 4
    path = tmp_path / "keep-all" / "purr.s1.jsonl"
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('"kind": "done"')])  # as a kill in the middle of a write leaves it
    torn = read_run(path)
    assert torn is not None
    assert not torn.done
    results = run_debug_gym(server.url, ["purr"], ["keep-all"], seeds=[0, 1, 2], **common)
    assert len(server.bodies) == 8
    assert [(result.key.seed, result.resolved, len(result.steps)) for result in results] == [
        (0, True, 2),
        (1, True, 2),
        (2, True, 2),
    ]
    with pytest.raises(SettingsChangedError, match="max_steps differ"):
        run_debug_gym(server.url, ["purr"], ["keep-all"], max_steps=7, **common)
    assert {body["seed"] for body in server.bodies} == {0, 1, 2}


def test_a_failing_task_is_reported_and_the_others_go_on(server: FakeChatServer, tmp_path: Path) -> None:
    def some_broken(task: str) -> Script:
        return quick(task) if task == "purr" else Script(task, (Step("Look.", "eval", {}),))

    lines: list[str] = []
    common = {"session_factory": stubbing_session, "out": tmp_path, "progress": lines.append, "workers": 1}
    unconfined = Options(confined=False)
    run_debug_gym(server.url, ["sum_tree", "purr"], ["keep-all"], script=some_broken, options=unconfined, **common)
    by_task = {result.key.task: result for result in read_runs(tmp_path)}
    assert by_task["purr"].resolved
    assert by_task["purr"].end["confinement"] == "off"
    assert not by_task["sum_tree"].done
    assert "the script ends after 1 steps" in by_task["sum_tree"].end["error"]
    assert any("FAILED: ScriptError" in line for line in lines)
    assert lines[-1].startswith("[2/2] keep-all purr s0: resolved, 2 turns, 1/1 tests")


def test_a_dead_server_is_one_clear_error(tmp_path: Path) -> None:
    with FakeChatServer() as gone:
        url = gone.url
    lines: list[str] = []
    with pytest.raises(ServerDownError, match=f"no server at {url}: Connection refused"):
        run_debug_gym(url, ["purr"], ["keep-all"], out=tmp_path, script=quick, progress=lines.append)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_dies_stops_everything_once(tmp_path: Path) -> None:
    with FakeChatServer() as dying:

        def reply(body: dict[str, Any]) -> dict[str, Any]:
            if len(dying.bodies) == 3:
                threading.Thread(target=dying._server.server_close).start()
            return {"role": "assistant", "content": "ok"}

        dying.reply = reply
        lines: list[str] = []
        with pytest.raises(ServerDownError, match=r"no usable answer from the server.*start again to continue"):
            run_debug_gym(
                dying.url,
                ["purr"],
                ["keep-all"],
                seeds=[0, 1, 2, 3],
                workers=1,
                out=tmp_path,
                script=quick,
                session_factory=stubbing_session,
                progress=lines.append,
            )
    done = {result.key.seed: result.done for result in read_runs(tmp_path)}
    assert done == {0: True, 1: False}


def test_a_hanging_run_is_ended(tmp_path: Path, server: FakeChatServer) -> None:
    server.reply = lambda body: time.sleep(20) or {"role": "assistant", "content": "late"}  # type: ignore[func-returns-value]
    [result] = run_debug_gym(
        server.url,
        ["purr"],
        ["keep-all"],
        out=tmp_path,
        script=quick,
        session_factory=stubbing_session,
        options=Options(time_limit=4),
        progress=lambda _: None,
    )
    assert result.end["error"] == "TimeLimit: still running after 4 s"


INTERRUPTED = """
import sys
from pathlib import Path
from leyline_evals.gym.run import run_debug_gym
from leyline_evals.gym.script import Script, Step
from leyline_evals.gym.testing import stubbing_session
def script(task):
    return Script(task, (Step("Look.", "eval", {}), Step("Wait.", "bash", {"command": "sleep 95"})))
if __name__ == "__main__":
    run_debug_gym(sys.argv[1], ["purr"], ["keep-all"], out=Path(sys.argv[2]), script=script,
                  session_factory=stubbing_session)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_cleans_up(number: signal.Signals, server: FakeChatServer, tmp_path: Path) -> None:
    program, out, temporary = tmp_path / "program.py", tmp_path / "out", tmp_path / "tmp"
    program.write_text(INTERRUPTED)
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, str(program), server.url, str(out)], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while len(server.bodies) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)
        [folder] = temporary.glob("leyline-gym-*")
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in errors
    assert process.returncode != 0
    assert list(temporary.glob("leyline-gym-*")) == []
    assert kill_marked(RUN_MARKER, folder) == 0
    [result] = read_runs(out)
    assert len(result.steps) == 1
    assert not result.done
