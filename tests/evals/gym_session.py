"""The experiment's arms through real sessions: the client against its own fake server, on a real environment.

Run in the debug-gym environment: ``pytest tests/evals/gym_*.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyline_client.testing import FakeServer
from leyline_evals.gym import load_recording
from leyline_evals.gym.arms import leyline_session
from leyline_evals.gym.results import RunResult
from leyline_evals.gym.run import run_debug_gym
from leyline_evals.gym.script import load_script
from leyline_evals.gym.summary import summarize

ARMS = ("keep-all", "truncate+forget", "truncate+amortize", "stale+amortize")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[RunResult]:
    lines: list[str] = []
    with FakeServer().serve() as url:
        out = tmp_path_factory.mktemp("arms")
        results = run_debug_gym(url, ["purr"], ARMS, workers=2, out=out, script=load_script, progress=lines.append)
    assert all(result.resolved for result in results), lines
    return results


def receipts(result: RunResult) -> list[dict[str, Any]]:
    return [step["leyline"]["receipt"] for step in result.steps]


def test_every_arm_solves_the_task_in_the_same_turns(results: list[RunResult]) -> None:
    assert [result.key.arm for result in results] == list(ARMS)
    recorded = len(load_recording("purr").steps)
    assert [len(result.steps) for result in results] == [recorded] * 4
    executed = [{receipt["executed"] for receipt in receipts(result)} for result in results]
    assert executed == [{"append"}, {"append", "forget"}, {"append", "amortize"}, {"append", "amortize"}]
    assert all(receipt["reason"] is None for result in results for receipt in receipts(result))


def test_runs_do_not_warm_each_other(results: list[RunResult]) -> None:
    assert [result.steps[0]["leyline"]["receipt"]["cached_tokens"] for result in results] == [0, 0, 0, 0]


def test_amortize_prefills_what_keep_all_does_and_its_replacements(results: list[RunResult]) -> None:
    arms = summarize(results)["arms"]
    for result in results[2:]:
        replaced = sum(receipt["replacement_tokens"] for receipt in receipts(result))
        arm = arms[result.key.arm]
        assert replaced > 0
        assert arm["prefilled_tokens"] == arms["keep-all"]["prefilled_tokens"] + replaced
        assert arm["prompt_tokens"] < arms["keep-all"]["prompt_tokens"]
    assert arms["truncate+forget"]["prefilled_tokens"] > 1.2 * arms["truncate+amortize"]["prefilled_tokens"]
    assert arms["truncate+forget"]["prompt_tokens"] == arms["truncate+amortize"]["prompt_tokens"]


def test_no_session_id_or_prompt_reaches_a_file(results: list[RunResult]) -> None:
    for result in results:
        assert all(set(step["leyline"]) == {"receipt", "version"} for step in result.steps)
    assert "Meow" not in repr(results)


def test_a_policy_that_is_not_there_is_a_reported_failure(tmp_path: Path) -> None:
    lines: list[str] = []
    with FakeServer().serve() as url:
        [result] = run_debug_gym(
            url,
            ["purr"],
            ["no-such-policy+amortize"],
            out=tmp_path,
            script=load_script,
            session_factory=leyline_session,
            progress=lines.append,
        )
    assert result.end is not None
    assert "no-such-policy" in result.end["error"]
    assert "FAILED" in lines[-1]
