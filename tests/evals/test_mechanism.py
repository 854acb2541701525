"""The load: the same prompts in every arm, what each finds cached, and what a failing server does."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from leyline_client import Directive
from leyline_client.testing import FakeServer
from leyline_evals import cli
from leyline_evals.common import EvalError
from leyline_evals.mechanism import plot, table
from leyline_evals.mechanism_load import PAPER, Agent, Served, Tokens, Workload, run_load
from leyline_evals.mechanism_load import Server as LoadServer


class Recorder:
    """An arm that applies edits to a list, as a server would."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.closed = False

    def turn(self, edits: Sequence[Directive], append: Sequence[int], new_tokens: int) -> Served:
        prompt = list(self.prompts[-1]) if self.prompts else []
        for edit in reversed(edits):
            prompt[edit.start : edit.end] = edit.replacement
        self.prompts.append(prompt + list(append))
        return Served(random.random(), len(self.prompts[-1]), 0, 0)

    def close(self) -> None:
        self.closed = True


WORKLOAD = Workload(sessions=3, turns=5, system_tokens=30, turn_tokens=20, keep_tokens=4, stub_tokens=2)


def agents(workload: Workload = WORKLOAD) -> list[Agent]:
    system = Tokens(1000, "system").take(workload.system_tokens)
    stub = (7,) * workload.stub_tokens
    return [Agent(workload, Recorder(), Tokens(1000, f"s{i}"), system, stub) for i in range(workload.sessions)]


def test_every_turn_beyond_the_age_evicts_one_output_and_no_other_byte() -> None:
    (agent,) = agents(Workload(sessions=1, turns=5, system_tokens=30, turn_tokens=20, keep_tokens=4, stub_tokens=2))
    run_load([agent], 1)
    assert isinstance(agent.turns, Recorder)
    prompts = agent.turns.prompts
    whole = [prompts[0][30:50], prompts[1][50:70]]
    whole += [prompts[turn][-20:] for turn in (2, 3, 4)]
    short = [[*output[:4], 7, 7] for output in whole]
    for turn, prompt in enumerate(prompts):
        evicted = max(0, turn - 1)
        expected = prompts[0][:30] + list(itertools.chain(*short[:evicted], *whole[evicted : turn + 1]))
        assert prompt == expected, turn
    assert max(map(len, prompts)) == WORKLOAD.longest()
    assert agent.turns.closed


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_every_session_gets_all_its_turns_in_order(concurrency: int) -> None:
    mine = agents()
    served = run_load(mine, concurrency)
    assert len(served) == WORKLOAD.sessions * WORKLOAD.turns
    first = [agent.turns.prompts for agent in mine if isinstance(agent.turns, Recorder)]
    again = agents()
    run_load(again, 1)
    assert first == [agent.turns.prompts for agent in again if isinstance(agent.turns, Recorder)]


def test_a_failing_request_ends_the_run_and_every_session() -> None:
    mine = agents()

    def fail(*_: Any) -> Served:
        raise EvalError("no")

    mine[1].turns.turn = fail  # type: ignore[method-assign]
    with pytest.raises(EvalError, match="no"):
        run_load(mine, 2)
    assert all(agent.turns.closed for agent in mine if isinstance(agent.turns, Recorder))


def test_leyline_arms_on_the_wire_serve_the_same_prompts_and_reuse_more_with_amortize() -> None:
    totals: dict[str, list[int]] = {}
    with FakeServer().serve() as url:
        server = LoadServer(url, 1000)
        for arm in ("leyline+forget", "leyline+amortize"):
            found = run_load(server.agents(arm, WORKLOAD), 1)
            totals[arm] = [sum(s.prompt_tokens for s in found), sum(s.cached_tokens for s in found)]
        server.close()
    assert totals["leyline+forget"][0] == totals["leyline+amortize"][0]
    assert totals["leyline+forget"][1] < totals["leyline+amortize"][1]


def test_the_papers_sizes() -> None:
    assert (PAPER.sessions, PAPER.turns, PAPER.system_tokens, PAPER.turn_tokens) == (16, 6, 4096, 2048)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--sessions", "0"], "--sessions must be at least 1"),
        (["--keep-tokens", "200"], "must become shorter"),
        (["--concurrency", "0"], "--concurrency"),
    ],
)
def test_impossible_sizes_are_refused(option: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mechanism", "--base-url", "http://127.0.0.1:9", *option]) == 1
    assert said in capsys.readouterr().err


def test_table_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    row = {"arm": "stock radix", "requests": 9, "prefilled_tokens": 5, "hit_rate": 0.5, "latency_ms": {"p50": 1.0,
           "p95": 2.0}}  # fmt: skip
    ttft = {"configuration": "summarisation", "prompt_tokens": 9, "prefilled_tokens": 3, "summary_ms": {"p50": 4.0},
            "ttft_ms": {"p50": 7.0, "p95": 8.0}}  # fmt: skip
    result = {"rows": [{**row, "concurrency": c} for c in (1, 4)], "ttft": [ttft], "does_not_fit": ["no compaction"]}
    text = table(json.loads(json.dumps(result)))
    assert "50.0%" in text
    assert "no compaction: does not fit" in text
    assert plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
