"""Tasks x arms x seeds on real environments: parallel, resumable, one process and one folder per run."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from leyline_evals.gym.arms import DEFAULT_ARMS, leyline_session, parse_arm
from leyline_evals.gym.confine import ConfinementError
from leyline_evals.gym.env import RUN_MARKER
from leyline_evals.gym.llm import ServerDownError
from leyline_evals.gym.processes import forkserver, kill_marked
from leyline_evals.gym.results import RunFile, RunKey, RunResult, finished_keys, read_run
from leyline_evals.gym.script import Script
from leyline_evals.gym.tasks import DEBUG_GYM_VERSION, DEFAULT_TASKS, check_tasks
from leyline_evals.gym.worker import Run, SessionFactory, child_main


@dataclass(frozen=True)
class Options:
    """How every run of an experiment is done.

    ``stream`` makes TTFT measurable for real models; scripted runs ask for one token, so there it is the whole time.
    ``time_limit`` ends a run that hangs, in seconds. ``confined=False`` gives up the protection of
    :mod:`leyline_evals.gym.confine`, for systems that have none of its mechanisms.
    """

    model: str = "default"
    request_options: Mapping[str, Any] | None = None
    stream: bool = False
    keep_transcripts: bool = False
    confined: bool = True
    time_limit: float = 3600.0


@dataclass
class _Active:
    key: RunKey
    process: BaseProcess
    connection: Connection
    file: RunFile
    folder: Path
    started: float


def run_debug_gym(
    base_url: str,
    tasks: Sequence[str] = DEFAULT_TASKS,
    arms: Sequence[str] = DEFAULT_ARMS,
    seeds: Sequence[int] = (0,),
    max_steps: int = 50,
    workers: int = 2,
    out: Path = Path("out/debug-gym"),
    script: Callable[[str], Script] | None = None,
    session_factory: SessionFactory = leyline_session,
    options: Options | None = None,
    progress: Callable[[str], None] = print,
) -> list[RunResult]:
    """Run every arm on every task with every seed and return the results, in that order of nesting.

    Runs whose done-marker is in ``out`` are not repeated; failed and cut-off ones are. With ``script`` (for instance
    ``load_script``) the actions come from scripts while every request is really made. ``session_factory`` is called
    in the run's own process as ``(base_url, arm, seed)``. A run that fails is reported and recorded, and the others
    go on.

    Raises:
        ServerDownError: once, when the server cannot be reached; what was finished is kept.
        UnknownTaskError, UnknownArmError: before anything runs.
        SettingsChangedError: when ``out`` holds results of other settings.
        ConfinementError: when tasks cannot be kept inside their folders here.
    """
    options = options or Options()
    chosen = check_tasks(tasks)
    for arm in arms:
        parse_arm(arm)
    if workers < 1 or max_steps < 1:
        raise ValueError("workers and max_steps must be at least 1")
    keys = [RunKey(arm, task, seed) for seed, task, arm in itertools.product(seeds, chosen, arms)]
    settings = _settings(options, max_steps, script is not None)
    finished = finished_keys(out, settings)
    todo = [key for key in keys if key not in finished]
    progress(f"{len(keys)} runs, {len(keys) - len(todo)} already done")
    if todo:
        _check_reachable(base_url)
        runs = {key: _describe(key, base_url, max_steps, script, options) for key in todo}
        with _terminable(), _Runner(out, settings, session_factory, options, progress, len(todo)) as runner:
            runner.run_all(runs, workers)
    results = (read_run(key.path(out)) for key in sorted(keys, key=lambda key: (arms.index(key.arm), key.task)))
    return [result for result in results if result is not None]


class _Runner:
    """Starts children, collects what they send and cleans up after them, whatever happens."""

    def __init__(
        self,
        out: Path,
        settings: dict[str, Any],
        session_factory: SessionFactory,
        options: Options,
        progress: Callable[[str], None],
        total: int,
    ) -> None:
        self.out, self.settings, self.session_factory, self.options = out, settings, session_factory, options
        self.progress, self.total, self.ended = progress, total, 0
        self.active: list[_Active] = []
        self.root = Path(tempfile.mkdtemp(prefix="leyline-gym-")).resolve()

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for active in self.active:
            active.process.terminate()
        for active in self.active:
            active.file.close()
            self._reap(active)
        kill_marked(RUN_MARKER, self.root)
        shutil.rmtree(self.root, ignore_errors=True)

    def run_all(self, runs: Mapping[RunKey, Run], workers: int) -> None:
        """Run everything, at most ``workers`` at a time."""
        waiting = list(runs.items())
        while waiting or self.active:
            while waiting and len(self.active) < workers:
                self._start(*waiting.pop(0))
            ready = wait([active.connection for active in self.active], timeout=1.0)
            for active in [active for active in self.active if active.connection in ready]:
                self._receive(active)
            for active in list(self.active):
                if time.monotonic() - active.started > self.options.time_limit:
                    limit = f"TimeLimit: still running after {self.options.time_limit:g} s"
                    self._end(active, "failed", {"error": limit})

    def _start(self, key: RunKey, run: Run) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"{key.task}-", dir=self.root))
        context = forkserver()
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, run, self.session_factory, folder)
        process = context.Process(target=child_main, args=arguments, daemon=True)
        process.start()
        sender.close()
        file = RunFile(self.out, key, self.settings)
        self.active.append(_Active(key, process, receiver, file, folder, time.monotonic()))

    def _receive(self, active: _Active) -> None:
        try:
            kind, value = active.connection.recv()
        except (EOFError, OSError):
            active.process.join(5)
            kind, value = "failed", {"error": f"ChildDied: the run's process ended with {active.process.exitcode}"}
        if kind == "step":
            active.file.step(value)
        elif kind == "transcript":
            lines = "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in value)
            active.key.path(self.out).with_suffix(".transcript.jsonl").write_text(lines, encoding="utf-8")
        else:
            self._end(active, kind, value)

    def _end(self, active: _Active, kind: str, value: dict[str, Any]) -> None:
        seconds = round(time.monotonic() - active.started, 3)
        self.active.remove(active)
        active.file.finish(kind, {**value, "seconds": seconds})
        self._reap(active)
        self.ended += 1
        self.progress(f"[{self.ended}/{self.total}] {active.key}: {_summary(kind, value)} ({seconds:.1f} s)")
        if value.get("fatal"):
            error = ConfinementError if value["error"].startswith(ConfinementError.__name__) else ServerDownError
            raise error(f"{value['error']}; stopped. {self.out} keeps what is done; start again to continue")

    def _reap(self, active: _Active) -> None:
        active.process.join(2)
        if active.process.is_alive():
            active.process.kill()
            active.process.join()
        active.connection.close()
        kill_marked(RUN_MARKER, active.folder)
        shutil.rmtree(active.folder, ignore_errors=True)


def _settings(options: Options, max_steps: int, scripted: bool) -> dict[str, Any]:
    return {
        "max_steps": max_steps,
        "scripted": scripted,
        "model": options.model,
        "request_options": dict(options.request_options or {}),
        "stream": options.stream,
        "debug_gym": DEBUG_GYM_VERSION,
    }


def _describe(
    key: RunKey, base_url: str, max_steps: int, script: Callable[[str], Script] | None, options: Options
) -> Run:
    return Run(
        base_url=base_url,
        arm=key.arm,
        task=key.task,
        seed=key.seed,
        max_steps=max_steps,
        model=options.model,
        request_options=dict(options.request_options or {}),
        stream=options.stream,
        script=script(key.task) if script else None,
        keep_transcript=options.keep_transcripts,
        confined=options.confined,
    )


def _check_reachable(base_url: str) -> None:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url must be an http(s) URL, not {base_url!r}")
    try:
        with socket.create_connection((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)), 10):
            pass
    except OSError as error:
        raise ServerDownError(f"no server at {base_url}: {error.strerror or error}") from error


def _summary(kind: str, value: Mapping[str, Any]) -> str:
    if kind == "failed":
        return f"FAILED: {value['error']}"
    verdict = "resolved" if value["resolved"] else f"not resolved ({value['ended']})"
    return f"{verdict}, {value['turns']} turns, {value['score']}/{value['max_score']} tests"


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that it too cleans up. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
