"""The command line: what it prints and its exit status, without a server."""

import shlex
from pathlib import Path

import pytest

from leyline_client import __version__
from leyline_client.cli import COMMANDS, doctor, main, serve
from leyline_client.cli.doctor import Need, check_server, describe
from leyline_client.testing import FakeServer


def test_every_module_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert {"serve", "doctor", "version"} <= set(COMMANDS)
    assert all(f"\n    {name}" in text for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def _gpu_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["serve", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return shlex.split(next(line for line in lines if "sglang.launch_server" in line))


def test_gpu_command_selects_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    command = _gpu_command(capsys, "--model", "org/a model")
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "org/a model"]
    assert command[command.index("--radix-cache-backend") + 1] == "leyline"
    assert "--dtype" not in command


def test_gpu_command_reflects_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--port", "31000", "--host", "0.0.0.0", "--context-length", "4096", "--max-total-tokens", "9000"]
    command = _gpu_command(capsys, *options, "--dtype", "bfloat16", "--stock", "--", "--tp", "2")
    for name, value in zip(options[::2], options[1::2], strict=True):
        assert command[command.index(name) + 1] == value
    assert command[command.index("--dtype") + 1] == "bfloat16"
    assert "--radix-cache-backend" not in command
    assert command[-2:] == ["--tp", "2"]


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--port", "x"], ["--context-length", "0"], ["--dtype", "int8"]]
)
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *arguments])
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_unknown_embedded_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--embedded", "--model", "no-such-model"]) == 1
    assert "no-such-model" in capsys.readouterr().err


@pytest.mark.parametrize(("log", "says"), [("no/such/x.log", "there is no folder no/such"), (".", "is a folder")])
def test_a_log_that_cannot_be_written_is_an_error(
    log: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--embedded", "--model", "tiny-gqa", "--log", log]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"leyline: --log {log}: ")
    assert says in error


def test_embedded_without_sglang_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda _name: None)
    assert main(["serve", "--embedded"]) == 1
    printed = capsys.readouterr()
    assert "needs SGLang 0.5.23" in printed.err
    assert "make demo" in printed.err
    assert not printed.out


def test_a_stock_server_is_not_sent_to_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 0
    assert "leyline doctor http" in capsys.readouterr().out
    assert main(["serve", "--stock"]) == 0
    assert "leyline doctor" not in capsys.readouterr().out


def test_doctor_does_not_say_that_a_missing_sglang_finds_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda _name: None)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "no SGLang here that could find the extension" in text
    assert "SGLang finds" not in text


def test_doctor_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"leyline-client {__version__}" in text
    assert "httpx" in text
    assert "sglang" in text


def test_doctor_names_remedy_and_checked_version() -> None:
    need = Need("sglang", "0.5.23", "server", "pip install it")
    assert "pip install it" in describe(need, None)
    assert "checked with 0.5.23 only" in describe(need, "0.6.0")
    assert describe(need, "0.5.23").startswith("ok")


def test_doctor_fails_where_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().out


def test_doctor_recognises_the_extension(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert check_server("http://fake", transport=server.transport) == 0
    assert "protocol 1" in capsys.readouterr().out
