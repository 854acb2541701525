from __future__ import annotations

import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from leyline_client.testing import FakeServer

DEMO = Path(__file__).parents[2] / "examples" / "demo"
ROW_KEYS = ["turn", "prompt_tokens", "cached_tokens", "rotated_tokens", "prefilled_tokens", "edits", "ttft_ms"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A whole run against a server without a model."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, FakeServer().serve() as url, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(DEMO))
        patch.chdir(folder)
        patch.setattr("sys.argv", ["run.py", "--base-url", url])
        code = importlib.import_module("run").main()
    result = json.loads((folder / "out/demo.json").read_text())
    return {"code": code, "result": result, "printed": printed.getvalue(), "folder": folder}


def test_a_run_writes_what_it_promises(finished: dict[str, Any]) -> None:
    assert finished["code"] == 0
    result = finished["result"]
    assert list(result) == ["server", "arms"]
    assert list(result["arms"]) == ["keep-all", "forget", "amortize"]
    for rows in result["arms"].values():
        assert [row["turn"] for row in rows] == list(range(1, 15))
        assert all(list(row) == ROW_KEYS for row in rows)
        assert all(row["cached_tokens"] + row["prefilled_tokens"] == row["prompt_tokens"] for row in rows)
        assert all(row["ttft_ms"] > 0 for row in rows)
    assert (finished["folder"] / "out/demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_arms_differ_in_what_they_are_meant_to(finished: dict[str, Any]) -> None:
    keep, forget, amortize = finished["result"]["arms"].values()
    assert not any(row["edits"] or row["rotated_tokens"] for row in keep)
    assert [row["edits"] for row in forget] == [row["edits"] for row in amortize]
    assert sum(row["edits"] for row in amortize) >= 5
    assert not any(row["rotated_tokens"] for row in forget)
    assert sum(row["rotated_tokens"] for row in amortize) > 0
    assert amortize[-1]["prompt_tokens"] == forget[-1]["prompt_tokens"] < keep[-1]["prompt_tokens"]
    assert sum(row["prefilled_tokens"] for row in amortize) < sum(row["prefilled_tokens"] for row in forget)


def test_the_output_says_what_is_real_and_what_is_scripted(finished: dict[str, Any]) -> None:
    printed = finished["printed"]
    assert "scripted   which tool is called" in printed
    assert "every sentence it says" in printed
    assert "the program's tests pass in every arm" in printed
    assert max(map(len, printed.splitlines())) <= 120


def test_an_unreachable_server_is_one_clear_line(demo_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = importlib.import_module("run")
    monkeypatch.setattr("sys.argv", ["run.py", "--base-url", "http://127.0.0.1:9"])
    assert run.main() == 1
    assert "ServerUnreachable" in capsys.readouterr().out


def test_an_interrupt_leaves_no_folder_behind(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = importlib.import_module("run")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen: list[Path] = []

    def interrupted(agents: dict[str, Any], script: object) -> None:
        seen.extend(agent.workspace.root for agent in agents.values())
        assert all(root.is_dir() for root in seen)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_run", interrupted)
    server = FakeServer()
    with server.serve() as url:
        monkeypatch.setattr("sys.argv", ["run.py", "--base-url", url])
        assert run.main() == 130
    assert len(seen) == 3
    assert not any(root.exists() for root in seen)
    assert not list(tmp_path.iterdir())
    assert "interrupted" in capsys.readouterr().out
