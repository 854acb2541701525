"""Start, watch and stop the embedded server."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from leyline_server_ext.embedded import _memory, reaper
from leyline_server_ext.embedded._command import ServerOptions, resolve_dtype, server_command, server_environment
from leyline_server_ext.embedded.errors import PortTakenError, ServerDiedError, StartTimeoutError
from leyline_server_ext.embedded.models import ensure_model

_GRACE_SECONDS = 5.0
_PROGRESS_SECONDS = 5.0
_LOG_TAIL_LINES = 40


class EmbeddedServer:
    """SGLang on the CPU, in processes of its own, for as long as a ``with`` block lasts.

    ::

        with EmbeddedServer("smollm2", progress=print) as server:
            client = LeylineClient(server.base_url)

    All processes end with the block, and also when this process is killed in any way (see `reaper`).

    Args:
        model: a name from `MODEL_NAMES` or a model folder; made or converted on first use.
        port: TCP port; 0 takes a free one.
        host: address to listen on.
        context_length: longest sequence in tokens; None takes the model's, at most 8,192.
        max_total_tokens: size of the KV pool in tokens.
        dtype: "auto" (what this CPU is fastest in), "float32", "bfloat16" or "float16".
        kv_cache_dtype: SGLang's option of that name; "auto" follows `dtype`.
        stock: run without Leyline's radix cache, for comparisons.
        api_key: key that every request must carry; None for an open server.
        extra_args: further SGLang options, last on the command line.
        env: variables to add to the server's environment.
        log_path: where its output goes; None uses a temporary file that is removed after an orderly stop.
        start_timeout: seconds until a server that does not answer is given up.
        progress: called with one line of text per step.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        context_length: int | None = None,
        max_total_tokens: int = 32_768,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        stock: bool = False,
        api_key: str | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        start_timeout: float = 600.0,
        progress: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self.model = model
        self.host = host
        self.port = port
        self._context_length = context_length
        self._max_total_tokens = max_total_tokens
        self._dtype = resolve_dtype(dtype)
        self._kv_cache_dtype = kv_cache_dtype
        self._stock = stock
        self._api_key = api_key
        self._extra_args = tuple(extra_args)
        self._env = dict(env or {})
        self._own_log = log_path is None
        self.log_path = log_path
        self._start_timeout = start_timeout
        self._progress = progress
        self._reaper: subprocess.Popen[bytes] | None = None
        self._work_dir: Path | None = None

    @property
    def base_url(self) -> str:
        """``http://host:port``; the port is known once started."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of SGLang's main process.

        Raises:
            ServerDiedError: the server is not running.
        """
        pids = self.pids()
        if not pids:
            raise ServerDiedError("the embedded server is not running")
        return pids[0]

    def pids(self) -> list[int]:
        """Ids of all server processes, SGLang's main process first; empty when not running."""
        return [] if self._reaper is None else reaper.descendants(self._reaper.pid)

    def start(self) -> Self:
        """Start and return once the server answers.

        Raises:
            ModelError: the model cannot be prepared.
            PortTakenError: the port is in use.
            MemoryShortError: not enough memory is available.
            ServerDiedError: the server ended, or runs without the extension; the message ends with its log.
            StartTimeoutError: it did not answer in time.
        """
        if self._reaper is not None:
            raise RuntimeError("the embedded server is already started")
        folder = ensure_model(self.model, self._progress)
        self.port = _claim_port(self.host, self.port)
        _memory.check(folder, self._dtype, self._max_total_tokens)
        options = ServerOptions(
            host=self.host,
            port=self.port,
            context_length=self._context_length or _model_context(folder),
            max_total_tokens=self._max_total_tokens,
            dtype=self._dtype,
            kv_cache_dtype=self._kv_cache_dtype,
            stock=self._stock,
            api_key=self._api_key,
            extra_args=self._extra_args,
        )
        try:
            self._spawn(server_command(folder, options))
            self._wait_healthy()
        except BaseException:
            self._end_processes()
            self._clean(keep_log=True)
            raise
        return self

    def stop(self) -> None:
        """End all processes and wait until they are gone. Harmless when not running."""
        self._end_processes()
        self._clean(keep_log=False)

    def wait(self) -> int:
        """Block until the server ends by itself; its exit code.

        Raises:
            ServerDiedError: it was never started.
        """
        if self._reaper is None:
            raise ServerDiedError("the embedded server is not running")
        return self._reaper.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of the server's log, "" when there is none."""
        if self.log_path is None or not self.log_path.is_file():
            return ""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _spawn(self, command: list[str]) -> None:
        self._work_dir = Path(tempfile.mkdtemp(prefix="leyline-server-"))
        if self.log_path is None:
            self.log_path = self._work_dir / "server.log"
        environment = server_environment({**os.environ, **self._env}, self._work_dir)
        guard = [
            sys.executable,
            "-I",
            reaper.__file__,
            str(os.getpid()),
            str(_GRACE_SECONDS),
            str(self._work_dir),
            "--",
        ]
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches us only, and we stop the server in order.
            self._reaper = subprocess.Popen(
                [*guard, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_healthy(self) -> None:
        assert self._reaper is not None
        began = time.monotonic()
        reported = 0.0
        self._progress(f"starting SGLang on the CPU at {self.base_url} (log: {self.log_path})")
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        with httpx.Client(base_url=self.base_url, headers=headers, trust_env=False, timeout=10.0) as http:
            while not _answers(http):
                elapsed = time.monotonic() - began
                if self._reaper.poll() is not None:
                    raise ServerDiedError(
                        f"the server ended with code {self._reaper.returncode}; log: {self.log_path}", self.log_tail()
                    )
                if elapsed > self._start_timeout:
                    raise StartTimeoutError(
                        f"no answer from the server in {elapsed:.0f} s; log: {self.log_path}", self.log_tail()
                    )
                if elapsed - reported >= _PROGRESS_SECONDS:
                    reported = elapsed
                    self._progress(f"still starting, {elapsed:.0f} s")
                time.sleep(0.1)
            http.post("/freeze_gc")  # part of the warm-up that the health check replaced: fewer pauses later
            if not self._stock and http.get("/leyline/v1/info").status_code != httpx.codes.OK:
                raise ServerDiedError(
                    f"SGLang runs, but without the Leyline extension; log: {self.log_path}", self.log_tail()
                )
        self._progress(f"ready after {time.monotonic() - began:.0f} s")

    def _end_processes(self) -> None:
        if self._reaper is None:
            return
        self._reaper.terminate()
        try:
            self._reaper.wait(_GRACE_SECONDS + 10.0)
        except subprocess.TimeoutExpired:
            left = reaper.descendants(self._reaper.pid)
            for pid in [self._reaper.pid, *left]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._reaper.wait()
        self._reaper = None

    def _clean(self, *, keep_log: bool) -> None:
        if self._work_dir is None or (keep_log and self._own_log):
            return
        shutil.rmtree(self._work_dir, ignore_errors=True)
        self._work_dir = None
        if self._own_log:
            self.log_path = None


def _claim_port(host: str, port: int) -> int:
    """A port nobody listens on: the asked-for one, or a free one for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTakenError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        return int(probe.getsockname()[1])


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _model_context(folder: Path) -> int:
    import json

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return min(int(config["max_position_embeddings"]), 8192)
