"""The command line: which commands there are, and how each says what went wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from leyline_evals import cli
from leyline_evals.common import EvalError, read_json, server_info
from leyline_evals.debug_gym_command import table

NO_DEBUG_GYM = find_spec("debug_gym") is None


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("replay", "fidelity", "mechanism", "debug-gym", "report"):
        assert name in text
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0


@pytest.fixture
def nobody() -> str:
    """A base URL where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("command", ["replay", "fidelity", "mechanism"])
def test_no_server_is_one_line(command: str, nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "x.json")
    assert cli.main([command, "--base-url", nobody, "--out", out]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"leyline-evals {command}: no server at {nobody}")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("command", ["replay", "fidelity", "mechanism"])
@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed: a server would be started")
def test_without_a_server_environment_the_way_out_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command]) == 1
    assert "give --base-url, or use the server environment" in capsys.readouterr().err


def test_a_server_without_the_extension_is_said() -> None:
    from leyline_client.testing import FakeServer

    with FakeServer(extension=False).serve() as url, pytest.raises(EvalError, match=url):
        server_info(url)
    with (
        FakeServer(enabled=False, refusals=["sliding window"]).serve() as url,
        pytest.raises(EvalError, match="does not splice here: sliding window"),
    ):
        server_info(url)


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="No such file"):
        read_json(tmp_path / "none.json")


@pytest.mark.skipif(not NO_DEBUG_GYM, reason="debug-gym is installed here")
def test_debug_gym_without_its_environment_says_which_to_use(nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["debug-gym", "--base-url", nobody]) == 1
    said = capsys.readouterr().err
    assert "requirements/evals.txt" in said
    assert said.count("\n") == 1


@pytest.mark.skipif(NO_DEBUG_GYM, reason="debug-gym is not installed here")
@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--tasks", "nothing"], "unknown task 'nothing'"),
        (["--arms", "nothing"], "arm 'nothing'"),
        ([], "no server at"),
        (["--max-steps", "0"], "max_steps"),
        (["--seeds", "0"], "--seeds"),
    ],
)
def test_debug_gym_errors_are_one_line(
    option: list[str], said: str, nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["debug-gym", "--base-url", nobody, "--out", str(tmp_path / "runs"), *option]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_solve_rates_as_text() -> None:
    figures = {"solved": 3, "runs": 4, "failed": 0, "turns": 40, "prefilled_tokens": 900}
    rate = {"estimate": 0.75, "low": 0.301, "high": 0.954}
    against = {"only_this": 1, "only_baseline": 0, "pairs": 4, "mcnemar_p": 1.0}
    text = table({"arms": {"keep-all": {**figures, "solve_rate": None}, "a": {**figures, "solve_rate": rate,
                                                                            "against": against}}})  # fmt: skip
    assert "75.0%" in text
    assert "30%-95%" in text
    assert "+1 -0 of 4" in text


def test_a_stop_by_signal_is_orderly(tmp_path: Path) -> None:
    script = (
        "import sys; from leyline_client.testing import FakeServer; from leyline_evals import cli\n"
        "server = FakeServer()\n"
        "with server.serve() as url:\n"
        f"    sys.exit(cli.main(['replay', '--base-url', url, '--out', {str(tmp_path / 'e.json')!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("e/*/*.jsonl")) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said.strip() == "leyline-evals replay: stopped; start again to continue"
