from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def workspace(demo_path: Path) -> Any:
    from bugfix.workspace import Workspace

    with Workspace() as opened:
        yield opened


def test_the_script_fixes_a_program_that_fails_before(workspace: Any) -> None:
    from bugfix.script import read_script

    assert not workspace.tests_pass()
    answers = [workspace.call(step.tool, step.arguments) for step in read_script() if step.tool]
    assert workspace.tests_pass()
    assert answers[-1].endswith("OK\nexit code 0")
    assert not any(answer.startswith("Error") for answer in answers)


def test_test_results_are_the_same_bytes_every_time(workspace: Any) -> None:
    first = workspace.call("run_tests", {})
    assert first == workspace.call("run_tests", {})
    assert str(workspace.root) not in first
    assert "exit code 1" in first


def test_an_edit_must_match_exactly_once(workspace: Any) -> None:
    before = workspace.call("read_file", {"path": "tally/money.py"})
    for old in ("no such line", "cents"):
        answer = workspace.call("edit_file", {"path": "tally/money.py", "old": old, "new": "x"})
        assert answer.startswith("Error: the old text occurs")
    assert workspace.call("read_file", {"path": "tally/money.py"}) == before


def test_nothing_outside_is_read_or_edited(workspace: Any, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("secret = 1\n")
    for path in (str(outside), "../" * 12 + str(outside).lstrip("/"), "tally"):
        assert workspace.call("read_file", {"path": path}).startswith("Error: no such file")
        assert workspace.call("edit_file", {"path": path, "old": "1", "new": "2"}).startswith("Error: no such file")
    assert outside.read_text() == "secret = 1\n"


def test_the_folder_goes_and_the_original_stays(demo_path: Path) -> None:
    from bugfix.workspace import Workspace

    original = (demo_path / "program/tally/money.py").read_text()
    with Workspace() as workspace:
        root = workspace.root
        (root / "tally/money.py").write_text("broken = True\n")
    assert not root.exists()
    assert (demo_path / "program/tally/money.py").read_text() == original
