"""Run files read back, and what is made of them. Needs no debug-gym."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyline_evals.gym.results import RunFile, RunKey, SettingsChangedError, finished_keys, read_run, read_runs
from leyline_evals.gym.summary import summarize

SETTINGS = {"max_steps": 5}


def write(out: Path, arm: str, task: str, seed: int, *, resolved: bool, prefilled: int, receipt: bool = True) -> None:
    with RunFile(out, RunKey(arm, task, seed), SETTINGS) as file:
        for turn in range(2):
            step = {"turn": turn, "prompt_tokens": 100, "cached_tokens": 100 - prefilled, "ttft_ms": 10.0 * (turn + 1)}
            step["leyline"] = {"receipt": {"prefilled_tokens": prefilled}} if receipt else None
            file.step(step)
        file.finish("done", {"resolved": resolved, "score": 1, "max_score": 1, "turns": 2, "seconds": 1.5})


def test_summary_of_a_known_experiment(tmp_path: Path) -> None:
    outcomes = [(True, False)] * 5 + [(True, True)] * 3
    for seed, (kept, cut) in enumerate(outcomes):
        write(tmp_path, "keep-all", "purr", seed, resolved=kept, prefilled=10)
        write(tmp_path, "truncate+forget", "purr", seed, resolved=cut, prefilled=40, receipt=seed % 2 == 0)
    with RunFile(tmp_path, RunKey("keep-all", "config", 0), SETTINGS) as file:
        file.finish("failed", {"error": "E: x"})
    summary = summarize(read_runs(tmp_path))
    assert summary["tasks"] == ["config", "purr"]
    kept, cut = summary["arms"]["keep-all"], summary["arms"]["truncate+forget"]
    assert (kept["runs"], kept["failed"], kept["solved"]) == (8, 1, 8)
    assert kept["solve_rate"]["high"] == 1.0
    assert "against" not in kept
    assert (cut["turns"], cut["prompt_tokens"], cut["prefilled_tokens"]) == (16, 1600, 640)
    assert cut["ttft_ms"] == {"p50": 15.0, "p95": 20.0}
    assert cut["seconds"] == 12.0
    against = cut["against"]
    assert (against["both"], against["only_baseline"], against["only_this"], against["neither"]) == (3, 5, 0, 0)
    assert against["mcnemar_p"] == 0.0625
    assert against["solve_rate_difference"]["estimate"] == -0.625
    assert against["solve_rate_difference"]["high"] < 0
    assert against["prefilled_difference_per_run"] == {"estimate": 60.0, "low": 60.0, "high": 60.0}


def test_an_arm_without_finished_runs_has_no_rate(tmp_path: Path) -> None:
    RunFile(tmp_path, RunKey("keep-all", "purr", 0), SETTINGS).close()
    summary = summarize(read_runs(tmp_path))
    assert summary["arms"]["keep-all"]["solve_rate"] is None
    assert summary["arms"]["keep-all"]["ttft_ms"] is None
    assert summary["arms"]["keep-all"]["failed"] == 1


def test_only_done_runs_count_as_finished(tmp_path: Path) -> None:
    write(tmp_path, "keep-all", "purr", 0, resolved=False, prefilled=1)
    with RunFile(tmp_path, RunKey("keep-all", "purr", 1), SETTINGS) as file:
        file.finish("failed", {"error": "E: x"})
    RunFile(tmp_path, RunKey("keep-all", "purr", 2), SETTINGS).close()
    assert finished_keys(tmp_path, SETTINGS) == {RunKey("keep-all", "purr", 0)}
    with pytest.raises(SettingsChangedError, match="model differ"):
        finished_keys(tmp_path, {**SETTINGS, "model": "x"})


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_file_is_not_done(tmp_path: Path, cut: int) -> None:
    write(tmp_path, "keep-all", "purr", 0, resolved=True, prefilled=1)
    path = tmp_path / "keep-all" / "purr.s0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: -cut - 1])
    run = read_run(path)
    assert run is not None
    assert not run.done
    assert len(run.steps) == 2
    path.write_bytes(whole[:10])
    assert read_run(path) is None
