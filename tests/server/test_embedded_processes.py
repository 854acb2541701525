"""Nothing of a server outlives its owner: the reaper and EmbeddedServer's supervision, with small stand-in servers."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leyline_server_ext.embedded import (
    EmbeddedServer,
    MemoryShortError,
    PortTakenError,
    ServerDiedError,
    StartTimeoutError,
    _memory,
    launch,
    reaper,
)
from leyline_server_ext.embedded._command import server_environment

# A server that ignores SIGINT and SIGTERM as does its child, writes both pids, and waits.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
with open(sys.argv[1] + ".part", "w") as out:
    out.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""

# A server that answers every request with 200, as a healthy one would.
HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else int(sys.argv[2]))
        self.end_headers()
    do_POST = do_GET
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def read_pids(path: Path) -> list[int]:
    wait_until(path.is_file)
    return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def pid_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pids"
    yield path
    if path.is_file():
        for pid in path.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def start_reaper(pid_file: Path, lifetime: float, parent: int, grace: float = 0.2) -> subprocess.Popen[bytes]:
    server = [sys.executable, "-c", STUBBORN, str(pid_file), str(lifetime)]
    guard = [sys.executable, "-I", reaper.__file__, str(parent), str(grace), str(pid_file.parent / "work"), "--"]
    return subprocess.Popen([*guard, *server])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopping_the_reaper_ends_stubborn_children(pid_file: Path, signum: int) -> None:
    process = start_reaper(pid_file, 600, os.getpid())
    pids = read_pids(pid_file)
    assert all(map(alive, pids))
    assert set(pids) <= set(reaper.descendants(process.pid))
    process.send_signal(signum)
    assert process.wait(30) == 0
    assert not any(map(alive, pids))


def test_server_end_takes_its_orphans_along(pid_file: Path) -> None:
    process = start_reaper(pid_file, 0.1, os.getpid())
    pids = read_pids(pid_file)
    assert process.wait(30) == 0
    assert not any(map(alive, pids))


def test_exit_code_comes_through(tmp_path: Path) -> None:
    guard = [sys.executable, "-I", reaper.__file__, str(os.getpid()), "0", str(tmp_path / "work"), "--"]
    assert subprocess.run([*guard, sys.executable, "-c", "raise SystemExit(7)"], check=False).returncode == 7


def test_server_gets_the_chance_to_clean_up(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "try:\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
        "finally:\n"
        "    open(sys.argv[1], 'w').close()"
    )
    guard = [sys.executable, "-I", reaper.__file__, str(os.getpid()), "30", str(tmp_path / "work"), "--"]
    command = [*guard, sys.executable, "-c", code, str(tmp_path / "cleaned")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(30) == 0
    assert (tmp_path / "cleaned").exists()


def test_sigkill_of_the_parent_leaves_nothing(pid_file: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-I', sys.argv[1], str(os.getpid()), '5', *sys.argv[2:]],"
        " start_new_session=True)\n"
        "time.sleep(600)"
    )
    work = pid_file.parent / "work"
    work.mkdir()
    (work / "log").touch()
    server = [sys.executable, "-c", STUBBORN, str(pid_file), "600"]
    parent = subprocess.Popen([sys.executable, "-c", code, reaper.__file__, str(work), "--", *server])
    pids = read_pids(pid_file)
    assert work.is_dir()
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(alive, pids)))
    wait_until(lambda: not work.exists())


def test_sigkill_of_the_reaper_ends_the_server(pid_file: Path) -> None:
    process = start_reaper(pid_file, 600, os.getpid())
    server, _ = read_pids(pid_file)
    process.kill()
    process.wait()
    wait_until(lambda: not alive(server))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs of failed starts are kept
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"max_position_embeddings": 100, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"num_key_value_heads": 2, "hidden_size": 64}'
    )
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return str(folder)


def run_instead(monkeypatch: pytest.MonkeyPatch, code: str, *arguments: str) -> None:
    """Let EmbeddedServer start a small script where it would start SGLang; {port} is filled in."""

    def command(_model: Path, options: object) -> list[str]:
        port = str(options.port)  # type: ignore[attr-defined]
        return [sys.executable, "-c", code, *(port if text == "{port}" else text for text in arguments)]

    monkeypatch.setattr(launch, "server_command", command)


def test_context_manager_starts_and_ends(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    run_instead(monkeypatch, HEALTHY, "{port}", "200")
    lines: list[str] = []
    with EmbeddedServer(model, progress=lines.append) as server:
        pids = server.pids()
        log = server.log_path
        assert server.pid == pids[0]
        assert server.port > 0
        assert log is not None
        assert log.is_file()
        with socket.create_connection((server.host, server.port), 5):
            pass
    assert not any(map(alive, pids))
    assert server.pids() == []
    assert not log.exists()
    assert any("ready after" in line for line in lines)
    server.stop()  # harmless a second time
    with pytest.raises(ServerDiedError):
        _ = server.pid


def test_server_without_the_extension_is_refused(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    run_instead(monkeypatch, HEALTHY, "{port}", "404")
    with pytest.raises(ServerDiedError, match="without the Leyline extension"):
        EmbeddedServer(model).start()
    with EmbeddedServer(model, stock=True) as server:
        assert server.pids()


def test_early_death_shows_code_and_log(monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path) -> None:
    run_instead(monkeypatch, "print('reason: no luck'); raise SystemExit(5)")
    server = EmbeddedServer(model, log_path=tmp_path / "log")
    with pytest.raises(ServerDiedError, match="code 5") as caught:
        server.start()
    assert "reason: no luck" in caught.value.log_tail
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
    assert server.pids() == []


def test_silent_server_times_out(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    run_instead(monkeypatch, "import time; time.sleep(600)")
    server = EmbeddedServer(model, start_timeout=0.3)
    with pytest.raises(StartTimeoutError):
        server.start()
    assert server.pids() == []


def test_exception_in_the_block_ends_the_server(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    run_instead(monkeypatch, HEALTHY, "{port}", "200")
    pids: list[int] = []

    def interrupted() -> None:
        with EmbeddedServer(model) as server:
            pids.extend(server.pids())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert pids
    assert not any(map(alive, pids))


def test_urls_of_both_address_families() -> None:
    assert EmbeddedServer(host="127.0.0.1", port=1).base_url == "http://127.0.0.1:1"
    assert EmbeddedServer(host="::1", port=2).base_url == "http://[::1]:2"


def test_starting_twice_is_refused(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    run_instead(monkeypatch, HEALTHY, "{port}", "200")
    with EmbeddedServer(model) as server, pytest.raises(RuntimeError, match="already"):
        server.start()


def test_taken_port_is_named(model: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=str(port)):
            EmbeddedServer(model, port=port).start()


def test_short_memory_is_named(model: str) -> None:
    with pytest.raises(MemoryShortError, match="max-total-tokens"):
        EmbeddedServer(model, max_total_tokens=10**12).start()


def test_memory_estimate_counts_weights_and_pool(model: str) -> None:
    assert _memory.weights_bytes(Path(model), "float32") == 2000
    assert _memory.weights_bytes(Path(model), "bfloat16") == 1000
    assert _memory.kv_bytes(Path(model), "bfloat16", 10) == 10 * 2 * 2 * 2 * 16 * 2
    assert _memory.available_bytes() > 0


def test_threads_that_wait_leave_the_core_to_others_unless_told_otherwise(tmp_path: Path) -> None:
    assert server_environment({}, tmp_path)["GOMP_SPINCOUNT"] == "2000"
    assert server_environment({"GOMP_SPINCOUNT": "7"}, tmp_path)["GOMP_SPINCOUNT"] == "7"
