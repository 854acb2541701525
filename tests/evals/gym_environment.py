"""Offline environments: repaired data, what the agent sees, and that nothing can be written outside the folder.

Run in the debug-gym environment: ``pytest tests/evals/gym_*.py``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyline_evals.gym import _debug_gym as dg
from leyline_evals.gym.confine import MECHANISMS, ConfinementError, confine
from leyline_evals.gym.data import prepare_task
from leyline_evals.gym.env import RUN_MARKER, OfflineMiniNightmareEnv, make_env
from leyline_evals.gym.processes import ChildDiedError, kill_marked, run_in_child
from leyline_evals.gym.stable import stable_text
from leyline_evals.gym.tasks import OFFLINE_TASKS, UnknownTaskError, check_tasks


@pytest.fixture
def env(tmp_path: Path) -> Iterator[OfflineMiniNightmareEnv]:
    environment = make_env("purr", tmp_path, tools=("view", "bash", "edit", "eval", "submit"))
    environment.reset()
    yield environment
    environment.close()


def call(env: OfflineMiniNightmareEnv, tool: str, **arguments: object) -> str:
    info = env.step(dg.ToolCall("call_1", tool, arguments))
    return str(info.step_observation.observation)


@pytest.mark.parametrize("task", OFFLINE_TASKS)
def test_data_is_complete(task: str, tmp_path: Path) -> None:
    folder = prepare_task(task, tmp_path / task)
    names = {path.name for path in folder.iterdir()}
    assert {"test.py", f"{task}_code.py", ".debugignore", ".debugreadonly"} <= names
    assert "__pycache__" not in names


def test_patcher_source_is_what_its_tests_describe(tmp_path: Path) -> None:
    lines = (prepare_task("patcher", tmp_path / "patcher") / "source_code.txt").read_text().split("\n")
    assert len(lines) == 6
    assert all(line.startswith("Never gonna ") for line in lines)
    assert len(set(lines)) == 6


@pytest.mark.parametrize("tasks", [[], ["nonsense"], ["pandas_dataframe"], ["purr", "purr"], ["../purr"]])
def test_bad_task_lists_are_refused(tasks: list[str]) -> None:
    with pytest.raises(UnknownTaskError):
        check_tasks(tasks)


def test_agent_sees_testbed_and_can_name_it(env: OfflineMiniNightmareEnv, tmp_path: Path) -> None:
    assert call(env, "bash", command="pwd") == "/testbed"
    assert "def test_cat_status" in call(env, "view", path="/testbed/test.py")
    trace = call(env, "bash", command="python -m pytest -q test.py")
    assert str(tmp_path) not in trace
    assert sys.prefix not in trace


def test_commands_get_none_of_the_callers_variables(
    env: OfflineMiniNightmareEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "do-not-leak")
    assert "do-not-leak" not in call(env, "bash", command="env")
    assert call(env, "bash", command="echo $HOME $TMPDIR | tr ' ' '\\n' | xargs -n1 basename") == "home\ntmp"


def test_tests_cannot_be_bent(env: OfflineMiniNightmareEnv) -> None:
    assert "not editable" in call(env, "edit", path="test.py", new_code="def test_nothing(): pass")
    call(env, "bash", command="echo 'def test_nothing(): pass' > test.py")
    call(env, "eval")
    assert not env.resolved
    assert env.tests_restored == 1
    call(env, "bash", command="rm test.py && ln -s /dev/null test.py")
    call(env, "eval")
    assert not env.resolved
    assert env.tests_restored == 2


def test_git_diff_shows_the_agents_change(env: OfflineMiniNightmareEnv) -> None:
    call(env, "edit", path="purr_code.py", start=27, end=27, new_code="        if 10 < self.hunger <= 20:")
    assert "+        if 10 < self.hunger <= 20:" in env.patch
    call(env, "eval")
    assert env.resolved


def test_timeout_kills_children_too(env: OfflineMiniNightmareEnv) -> None:
    started = time.monotonic()
    ok, output = env.terminal.run("echo before; sleep 97 & sleep 98", timeout=1)
    assert not ok
    assert "timed out after 1 seconds" in output
    assert "before" in output
    assert time.monotonic() - started < 10
    assert call(env, "bash", command="pgrep -fx 'sleep 9[78]' || echo none").splitlines()[-1] == "none"


def test_background_processes_are_found_by_their_marker(env: OfflineMiniNightmareEnv, tmp_path: Path) -> None:
    call(env, "bash", command="setsid sleep 96 > /dev/null 2>&1 < /dev/null &")
    assert kill_marked(RUN_MARKER, tmp_path / "elsewhere") == 0
    assert kill_marked(RUN_MARKER, tmp_path) == 1
    assert kill_marked(RUN_MARKER, tmp_path) == 0


ATTEMPTS = """
import os, pathlib, subprocess, sys, tempfile
from leyline_evals.gym.confine import confine
inside, outside = map(pathlib.Path, sys.argv[1:3])
mechanism = confine(inside, tuple(sys.argv[3:]))
(inside / "new").write_text("x")
(inside / "sub").mkdir()
(inside / "new").rename(inside / "sub" / "moved")
subprocess.run("echo y > /dev/null && openssl version > /dev/null 2>&1; true", shell=True, check=True)
os.openpty()
def attempt(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"
results = [
    attempt(lambda: (outside / "new").write_text("x")),
    attempt(lambda: (outside / "file").write_text("x")),
    attempt(lambda: (outside / "file").unlink()),
    attempt(lambda: (outside / "dir").mkdir()),
    attempt(lambda: (outside / "file").rename(inside / "stolen")),
    attempt(lambda: (inside / "sub" / "moved").rename(outside / "given")),
    attempt(lambda: os.truncate(outside / "file", 0)),
    attempt(lambda: (inside / "link").symlink_to(outside) or (inside / "link" / "new").write_text("x")),
]
shell = subprocess.run(f"echo x > {outside}/shell; rm -rf {outside}/file", shell=True, capture_output=True)
print(mechanism, *results, (outside / "file").read_text())
"""


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_confined_process_cannot_write_outside(mechanism: str, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "file").write_text("precious")
    command = [sys.executable, "-c", ATTEMPTS, str(inside), str(outside), mechanism]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ConfinementError" in run.stderr:
        pytest.skip(f"this system has no {mechanism}")
    assert run.returncode == 0, run.stderr
    used, *results, kept = run.stdout.split()
    assert used == mechanism
    assert "done" not in results
    assert len(results) == 8
    assert kept == "precious"
    assert sorted(path.name for path in outside.iterdir()) == ["file"]
    assert (inside / "sub" / "moved").exists()


def test_without_a_mechanism_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfinementError, match="cannot keep tasks inside"):
        confine(tmp_path, ())


def test_child_processes_answer_raise_or_are_reported_dead() -> None:
    assert run_in_child(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        run_in_child(divmod, 7, 0)
    with pytest.raises(ChildDiedError, match="status 9"):
        run_in_child(sys.modules["os"]._exit, 9)


@pytest.mark.parametrize(
    ("text", "stable"),
    [
        ("1 failed in 0.05s", "1 failed in 0.00s"),
        ("== 1 failed, 2 passed in 61.20s (0:01:01) ==", "==== 1 failed, 2 passed in 0.00s ===="),
        ("Ran 3 tests in 0.001s", "Ran 3 tests in 0.00s"),
        ("<Cat object at 0x7f3a5c0b1d90>", "<Cat object at 0x7f0000000000>"),
        ("Thread 139872938473216: 1 -> 2", "Thread 140000000000000: 1 -> 2"),
        ("platform linux -- Python 3.12.1\nrootdir: /x\nplugins: a-1\nrest", "rest"),
        ("/runs/a/work/test.py /runs/a/workshop", "/testbed/test.py /testbedshop"),
        ("in 3 steps, 0x1f, 12345", "in 3 steps, 0x1f, 12345"),
    ],
)
def test_volatile_text(text: str, stable: str) -> None:
    assert stable_text(text, {"/runs/a/work": "/testbed"}) == stable
