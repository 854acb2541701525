"""Replaying recordings against a server without a model: counts, checks, resuming, failures."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline_client.testing import FakeServer
from leyline_evals import cli
from leyline_evals.common import EvalError, ServerDown
from leyline_evals.gym import load_recording
from leyline_evals.gym.arms import leyline_session
from leyline_evals.replay import Options, replay
from leyline_evals.replay_summary import reprefill_avoided, table

ARMS = ("keep-all", "truncate+forget", "truncate+amortize", "stale+amortize")
TASKS = ("purr", "config")
SHORT = Options(max_turns=8)


@pytest.fixture
def server() -> Iterator[tuple[FakeServer, str]]:
    fake = FakeServer()
    with fake.serve() as url:
        yield fake, url


def quiet(_line: str) -> None:
    pass


def test_every_request_is_served_with_the_recorded_messages(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    fake, url = server
    summary = replay(url, ["purr"], ARMS, tmp_path / "runs", progress=quiet)
    recording = load_recording("purr")
    wanted = [turn.messages for turn in recording.turns()]
    sent = [turn.body["messages"] for turn in fake.turns[2:]]  # the first two warm up
    assert sent == wanted * len(ARMS)
    salts = {turn.body["cache_salt"] for turn in fake.turns}
    assert len(salts) == 1 + len(ARMS)
    assert not fake.sessions
    for figures in summary["arms"].values():
        assert figures["requests"] == len(wanted)
        assert figures["cached_tokens"] + figures["prefilled_tokens"] == figures["prompt_tokens"]
        assert figures["ttft_ms"]["count"] == len(wanted)
        assert figures["ttft_after_first_ms"]["count"] == len(wanted) - 1


def test_amortize_costs_what_keep_all_costs_and_forget_more(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    summary = replay(server[1], TASKS, ARMS, tmp_path / "runs", progress=quiet)
    arms = summary["arms"]
    assert [check["holds"] for check in summary["checks"]] == [True] * 4
    assert {check["arm"] for check in summary["checks"]} == {"truncate+amortize", "stale+amortize"}
    assert arms["truncate+amortize"]["rotated_tokens"] > 0
    assert arms["truncate+amortize"]["reprefill_avoided_tokens"] > 0
    assert arms["keep-all"]["reprefill_avoided_tokens"] == arms["truncate+forget"]["reprefill_avoided_tokens"] == 0
    less = arms["truncate+amortize"]["prefilled_less_than"]["truncate+forget"]
    assert less == arms["truncate+forget"]["prefilled_tokens"] - arms["truncate+amortize"]["prefilled_tokens"] > 0
    assert arms["truncate+forget"]["prompt_tokens"] == arms["truncate+amortize"]["prompt_tokens"]
    assert "truncate+amortize" in table(summary)


def test_two_runs_count_the_same_tokens(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    first = replay(server[1], TASKS, ARMS, tmp_path / "one", SHORT, progress=quiet)
    second = replay(server[1], TASKS, ARMS, tmp_path / "two", SHORT, progress=quiet)
    assert first["token_columns"] == second["token_columns"]
    shorter = replay(server[1], TASKS, ARMS, tmp_path / "three", Options(max_turns=5), progress=quiet)
    assert shorter["token_columns"] != first["token_columns"]
    assert [task["turns"] for task in shorter["tasks"]] == [5, 5]


def test_a_bound_that_does_not_hold_is_said_and_ends_with_1(
    server: tuple[FakeServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # min_chars so large that nothing is edited: the prompts cannot be shorter.
    arms = ["keep-all", "stale:min_chars=10000000+amortize".replace("stale", "stale-tool-detector")]
    out = tmp_path / "evals.json"
    status = cli.main(["replay", "--base-url", server[1], "--tasks", "purr", "--out", str(out), "--arms", *arms])
    assert status == 1
    checks = {check["name"]: check["holds"] for check in json.loads(out.read_text())["checks"]}
    assert checks["prompts shorter than keep-all's"] is False
    assert "DOES NOT HOLD" in capsys.readouterr().out


class _FailsOnce:
    """A session whose first ``create`` of a chosen task raises ``error``."""

    def __init__(self, inner: Any, error: BaseException, word: str, fired: list[str]) -> None:
        self._inner, self._error, self._word, self._fired = inner, error, word, fired
        self.chat = self
        self.completions = self

    def create(self, **request: Any) -> Any:
        turns = sum(message["role"] == "assistant" for message in request["messages"])
        if turns == 3 and not self._fired and self._word in json.dumps(request["messages"]):
            self._fired.append(self._word)
            raise self._error
        return self._inner.chat.completions.create(**request)

    def close(self) -> None:
        self._inner.close()


def test_a_cut_off_run_continues_where_it_was(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    fired: list[str] = []

    def factory(url: str, arm: str, seed: int) -> Any:
        return _FailsOnce(leyline_session(url, arm, seed), KeyboardInterrupt(), "purr", fired)

    out = tmp_path / "runs"
    with pytest.raises(KeyboardInterrupt):
        replay(server[1], TASKS[::-1], ARMS, out, SHORT, factory, progress=quiet)
    done_before = len(server[0].turns)
    lines: list[str] = []
    summary = replay(server[1], TASKS[::-1], ARMS, out, SHORT, progress=lines.append)
    assert lines[0] == "8 runs, 4 already done"
    again = sum(1 for turn in server[0].turns[done_before:] if len(turn.body["messages"]) > 1)
    assert again == len(ARMS) * SHORT.max_turns
    untouched = replay(server[1], TASKS[::-1], ARMS, tmp_path / "other", SHORT, progress=quiet)
    assert summary["token_columns"] == untouched["token_columns"]


def test_a_failing_task_is_reported_and_the_others_go_on(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    fired: list[str] = []

    def factory(url: str, arm: str, seed: int) -> Any:
        return _FailsOnce(leyline_session(url, arm, seed), EvalError("no luck"), "purr", fired)

    lines: list[str] = []
    summary = replay(server[1], TASKS, ARMS, tmp_path / "r", SHORT, factory, progress=lines.append)
    assert summary["failed"] == [{"arm": "keep-all", "task": "purr", "error": "EvalError: no luck"}]
    assert [task["task"] for task in summary["tasks"]] == ["config"]
    assert summary["arms"]["keep-all"]["requests"] == SHORT.max_turns
    assert any("FAILED: EvalError: no luck" in line for line in lines)
    repaired = replay(server[1], TASKS, ARMS, tmp_path / "r", SHORT, progress=quiet)
    assert not repaired["failed"]
    assert len(repaired["tasks"]) == 2


def test_a_server_that_dies_is_one_error_and_nothing_finished_is_lost(tmp_path: Path) -> None:
    fake = FakeServer()
    with fake.serve() as url:
        replay(url, ["purr"], ARMS[:1], tmp_path / "runs", progress=quiet)
    with pytest.raises(ServerDown, match="no server at"):
        replay(url, ["purr"], ARMS, tmp_path / "runs", progress=quiet)
    with FakeServer().serve() as other:
        lines: list[str] = []
        replay(other, ["purr"], ARMS, tmp_path / "runs", progress=lines.append)
    assert lines[0] == "4 runs, 1 already done"


def test_settings_must_not_be_mixed(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    replay(server[1], ["purr"], ARMS[:1], tmp_path / "runs", Options(max_turns=4), progress=quiet)
    with pytest.raises(EvalError, match="max_turns differ"):
        replay(server[1], ["purr"], ARMS[:1], tmp_path / "runs", progress=quiet)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "nothing"], "no recording of 'nothing'"),
        (["--arms", "what"], "arm 'what'"),
        (["--arms", "keep-all", "keep-all"], "each arm once"),
        (["--out", "results"], "must end in .json"),
        (["--max-tokens", "0"], "--max-tokens"),
        ([], "no server at"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert cli.main(["replay", "--base-url", url, *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_a_splice_avoids_is_counted_from_its_first_edit() -> None:
    receipt: dict[str, Any] = {"executed": "amortize", "cached_tokens": 900, "directives": [{"start": 300}]}
    step = {"leyline": {"receipt": {**receipt, "directives": [{"start": 500}, {"start": 300}]}}}
    assert reprefill_avoided(step) == 600
    assert reprefill_avoided({"leyline": {"receipt": {**receipt, "executed": "forget"}}}) == 0
    assert reprefill_avoided({"leyline": {"receipt": {**receipt, "directives": []}}}) == 0
