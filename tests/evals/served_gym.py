"""Every offline mini_nightmare task, solved by its scripted agent in every arm, over a real server.

The server's address is in ``LEYLINE_SERVER_URL``: ``tests/test_other_environments.py`` starts one, in another
environment than debug-gym's, with a tiny model whose context holds the longest unedited conversation.
"""

from __future__ import annotations

import os

import pytest

from leyline_evals.gym import OFFLINE_TASKS, load_recording
from leyline_evals.gym.arms import DEFAULT_ARMS
from leyline_evals.gym.results import RunResult
from leyline_evals.gym.run import run_debug_gym
from leyline_evals.gym.script import load_script

URL = os.environ.get("LEYLINE_SERVER_URL", "")
SLACK = 1.05

pytestmark = pytest.mark.skipif(not URL, reason="LEYLINE_SERVER_URL is unset: tests/test_other_environments.py sets it")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[RunResult]:
    out = tmp_path_factory.mktemp("served")
    lines: list[str] = []
    found = run_debug_gym(URL, OFFLINE_TASKS, DEFAULT_ARMS, out=out, script=load_script, progress=lines.append)
    assert len(found) == len(OFFLINE_TASKS) * len(DEFAULT_ARMS), lines
    return found


def test_every_task_is_resolved_in_every_arm(results: list[RunResult]) -> None:
    assert not [(result.key, result.end) for result in results if not result.resolved]
    for result in results:
        assert len(result.steps) == len(load_recording(result.key.task).steps)


def totals(results: list[RunResult], arm: str) -> dict[str, int]:
    receipts = [step["leyline"]["receipt"] for result in results if result.key.arm == arm for step in result.steps]
    names = ("prompt_tokens", "prefilled_tokens", "replacement_tokens", "rotated_tokens")
    return {name: sum(receipt[name] for receipt in receipts) for name in names}


def test_spliced_edits_cost_their_stubs_and_re_prefilled_ones_more(results: list[RunResult]) -> None:
    kept, forget = totals(results, "keep-all"), totals(results, "truncate+forget")
    for arm in ("truncate+amortize", "stale+amortize"):
        spliced = totals(results, arm)
        assert spliced["rotated_tokens"] > 0
        assert spliced["prompt_tokens"] < kept["prompt_tokens"]
        bound = SLACK * (kept["prefilled_tokens"] + spliced["replacement_tokens"])
        assert spliced["prefilled_tokens"] <= bound
    assert forget["rotated_tokens"] == 0
    assert forget["prefilled_tokens"] > SLACK * totals(results, "truncate+amortize")["prefilled_tokens"]
