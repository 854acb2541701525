"""One run of the experiment in a process of its own, which cannot write outside its folder.

The fork server imports this module once, so that starting a run costs a fork. The child sends messages to the runner,
which alone writes results: ``("step", {...})``, and at last ``("done", {...})`` or ``("failed", {...})``.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from leyline_evals.gym.agent import LeylineAgent
from leyline_evals.gym.confine import ConfinementError, confine
from leyline_evals.gym.env import make_env
from leyline_evals.gym.llm import ContextExceededError, LeylineLLM, ScriptedThroughServerLLM, ServerDownError
from leyline_evals.gym.script import Script

SessionFactory = Callable[[str, str, int], Any]
"""``(base_url, arm, seed)`` -> an object with ``chat.completions.create``; a module-level function."""


FATAL = (ServerDownError, ConfinementError)
"""Failures that every other run would meet too."""


@dataclass(frozen=True)
class Run:
    """What one child does. ``script`` makes the actions come from there instead of the model."""

    base_url: str
    arm: str
    task: str
    seed: int
    max_steps: int
    model: str
    request_options: dict[str, Any]
    stream: bool
    script: Script | None
    keep_transcript: bool
    confined: bool


def child_main(connection: Connection, run: Run, session_factory: SessionFactory, folder: Path) -> None:
    """Entry of the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the runner decides.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        connection.send(("done", _run(connection, run, session_factory, folder)))
    except Exception as error:
        # The stack without source lines or values: file, line and function only, so no prompt text.
        stack = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        failure = {"error": f"{type(error).__name__}: {str(error)[:500]}", "stack": stack[-20:]}
        connection.send(("failed", failure | {"fatal": isinstance(error, FATAL)}))
    finally:
        connection.close()


def _run(connection: Connection, run: Run, session_factory: SessionFactory, folder: Path) -> dict[str, Any]:
    mechanism = confine(folder) if run.confined else "off"
    (folder / "own").mkdir()
    tempfile.tempdir = str(folder / "own")
    session = session_factory(run.base_url, run.arm, run.seed)
    env = make_env(run.task, folder)
    try:
        agent = LeylineAgent(_llm(session, run), run.max_steps, lambda step: connection.send(("step", step)))
        try:
            outcome = agent.run(env)
        except ContextExceededError:
            outcome = {**agent.build_trajectory(), "ended": "context_length"}
        outcome |= {"confinement": mechanism, "tests_restored": env.tests_restored}
        if run.keep_transcript:
            connection.send(("transcript", agent.messages))
        return outcome
    finally:
        env.close()
        if hasattr(session, "close"):
            session.close()


def _llm(session: Any, run: Run) -> LeylineLLM:
    options = {"seed": run.seed, **run.request_options}
    if run.script is None:
        return LeylineLLM(session, run.model, request_options=options, stream=run.stream)
    return ScriptedThroughServerLLM(session, run.script, run.model, request_options=options, stream=run.stream)


def _exit_on_signal(*_: object) -> NoReturn:
    # debug-gym's step() swallows every exception, also SystemExit; the runner cleans up after us.
    os._exit(143)
