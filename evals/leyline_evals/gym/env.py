"""Offline mini_nightmare environments on a local terminal, each in its own folder.

What is enforced, and where:

- Every path an environment uses lies in one run folder: ``work`` (the task, shown as ``/testbed``), ``home``, ``tmp``
  and ``pristine`` (the task as it was). Commands get a small fixed environment: no variable of the caller, so no API
  key, reaches a task.
- The ``edit`` tool cannot touch ``test.py`` (debug-gym's read-only rule), and since ``bash`` could, the task's own
  test files are put back before every evaluation.
- Timed-out commands are killed with all their children.
- Writing outside the run folder is prevented by :mod:`leyline_evals.gym.confine`, which confines the *process*. The
  recorder and the runner call it in each worker before the environment exists. :func:`make_env` alone does not.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leyline_evals.gym import _debug_gym as dg
from leyline_evals.gym.data import prepare_task
from leyline_evals.gym.stable import WORKING_FOLDER, interpreter_paths, map_strings, stable_text

TOOLS = ("view", "grep", "bash", "pdb", "edit", "eval", "submit")
"""The tools every agent gets, in the order in which they are described to the model."""

RUN_MARKER = "LEYLINE_GYM_RUN"
"""Environment variable of every command of a run; its value is the run folder."""


class QuietLogger(logging.Logger):
    """Stands in for debug-gym's logger, which starts a thread and fills queues that nobody here reads."""

    log_file = None

    def __init__(self) -> None:
        super().__init__("leyline_evals.gym", logging.CRITICAL)

    def report_progress(self, **_: Any) -> None:
        """Do nothing: progress is reported by the runner."""


class PromptShellSession(dg.ShellSession):
    """A debugger session that is read as soon as it has something to say; the base class polls every 0.1 s."""

    def read(
        self,
        read_until: str | None = None,
        timeout: float | None = None,
        read_length: int = 4096,
        strip_output: bool = True,
    ) -> str:
        """Read until ``read_until`` (default: the shell's prompt) or the end, without it.

        Raises:
            TimeoutError: after ``timeout`` seconds (default 300).
        """
        sentinel = read_until or self.default_read_until
        deadline = time.monotonic() + (timeout or 300)
        output = ""
        while sentinel not in output:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing more came within {timeout or 300} seconds; so far: {output!r}")
            if not select.select([self.filedescriptor], [], [], left)[0]:
                continue
            try:
                data = os.read(self.filedescriptor, read_length)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno != errno.EIO:  # the other end of the terminal is closed
                    raise
                break
            output += data.decode("utf-8", errors="ignore")
        output = output.replace(sentinel, "").strip()
        return output.strip("\r\n") if strip_output else output


class RunTerminal(dg.LocalTerminal):
    """A local terminal that kills whole process groups and closes every session it opened."""

    def run(
        self,
        entrypoint: str | list[str],
        timeout: int | None = None,
        raises: bool = False,
        strip_output: bool = True,
    ) -> tuple[bool, str]:
        """Run commands in a fresh shell. Returns (succeeded, stdout then stderr).

        After ``timeout`` seconds the command and its children are killed and the result is a failure.

        Raises:
            ValueError: when ``raises`` is set and the command fails.
        """
        limit = timeout if timeout is not None else self.command_timeout
        process = subprocess.Popen(
            self.prepare_command(entrypoint),
            env=self.env_vars,
            cwd=self.working_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            raw_out, raw_err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            raw_out, raw_err = process.communicate()
            partial = _text(raw_out + raw_err).strip()
            notice = f"Command timed out after {limit} seconds"
            return False, f"{notice}\nPartial output:\n{partial}" if partial else notice
        except BaseException:
            _kill_group(process.pid)
            process.communicate()
            raise
        success = process.returncode == 0
        if raises and not success:
            raise ValueError(f"failed to run: {entrypoint}")
        output = _text(raw_out + raw_err)
        return success, output.strip("\r\n") if strip_output else output

    def new_shell_session(self) -> PromptShellSession:
        """Open a shell for the debugger; closed with the terminal."""
        session = PromptShellSession(
            shell_command=self.default_shell_command,
            session_commands=self.session_commands,
            working_dir=self.working_dir,
            env_vars=self.env_vars,
            logger=self.logger,
        )
        self.sessions.append(session)
        return session

    def close(self) -> None:
        """Close every shell session (the base class skips every other one)."""
        for session in list(self.sessions):
            self.close_shell_session(session)


class RunWorkspace(dg.Workspace):
    """A workspace at a given folder; the base class would choose one in the system's temporary folder."""

    def __init__(self, terminal: RunTerminal, folder: Path, logger: QuietLogger) -> None:
        super().__init__(terminal, logger=logger)
        self.folder = folder
        self.working_dir: Any = None

    def reset(self, readonly_patterns: list[str] | None = None, ignore_patterns: list[str] | None = None) -> None:
        """Start over with an empty folder."""
        self.cleanup()
        self.folder.mkdir(parents=True)
        self.working_dir = self.folder
        self.terminal.working_dir = str(self.folder)
        self.setup_file_filters(readonly_patterns, ignore_patterns)

    def cleanup(self) -> None:
        """Remove the folder."""
        self.working_dir = None
        if self.folder.exists():
            shutil.rmtree(self.folder)


class OfflineMiniNightmareEnv(dg.MiniNightmareEnv):
    """One mini_nightmare task inside ``run_folder``; see the module's text for what is enforced."""

    def __init__(self, task: str, run_folder: Path, run_timeout: int = 30) -> None:
        """Prepare the task's files and the terminal; :meth:`reset` starts it.

        ``run_timeout`` limits an evaluation and a pdb command, in seconds.
        """
        run_folder = run_folder.resolve()
        pristine = run_folder / "pristine"
        if not pristine.exists():
            prepare_task(task, pristine)
        logger = QuietLogger()
        terminal = RunTerminal(
            env_vars=_command_environment(run_folder), include_os_env_vars=False, logger=logger, command_timeout=60
        )
        super().__init__(
            task_data={
                "task_name": task,
                "codebase": pristine,
                "filename": f"{task}_code.py",
                "env_type": "mini_nightmare",
            },
            terminal=terminal,
            run_timeout=run_timeout,
            logger=logger,
        )
        self.workspace = RunWorkspace(terminal, run_folder / "work", logger)
        self.tests_restored = 0
        self._shown_as = {str(run_folder / "work"): WORKING_FOLDER, **interpreter_paths()}

    def setup_terminal(self) -> None:
        """Make the initial commit; upstream's ``git add *.py *.txt`` fails where there is no .txt file."""
        self.terminal.run(
            [
                "git init -q -b main",
                "git config user.name debug-gym",
                "git config user.email '<>'",
                "git add -A",
                "git commit -qm Init",
            ],
            raises=True,
        )

    def eval(self, **kwargs: Any) -> dg.EvalOutput:
        """Run the task's tests, after putting back test files that were changed."""
        self._restore_tests()
        return super().eval(**kwargs)

    def step(
        self, action_tool_call: Any, action_content: str | None = None, action_reasoning: str | None = None
    ) -> Any:
        """Act, with ``/testbed`` standing for the working folder in the arguments and in what comes back."""
        real = str(self.workspace.folder)
        if isinstance(action_tool_call, dg.ToolCall):
            arguments = map_strings(action_tool_call.arguments, lambda text: text.replace(WORKING_FOLDER, real))
            action = dg.ToolCall(id=action_tool_call.id, name=action_tool_call.name, arguments=arguments)
        else:
            action = action_tool_call
        info = super().step(action, action_content, action_reasoning)
        info.action_tool_call = action_tool_call
        for observation in info.all_observations:
            observation.observation = stable_text(observation.observation, self._shown_as)
        return info

    def _restore_tests(self) -> None:
        for pristine in Path(self.current_task["codebase"]).glob("*test*.py"):
            current = self.workspace.folder / pristine.name
            if current.is_symlink() or not current.is_file() or current.read_bytes() != pristine.read_bytes():
                if current.is_dir() and not current.is_symlink():
                    shutil.rmtree(current)
                else:
                    current.unlink(missing_ok=True)
                shutil.copyfile(pristine, current)
                self.tests_restored += 1


def make_env(
    task: str, run_folder: Path, tools: Iterable[str] = TOOLS, run_timeout: int = 30
) -> OfflineMiniNightmareEnv:
    """Build the environment of ``task`` in ``run_folder`` (must exist); call ``close()`` when done with it."""
    env = OfflineMiniNightmareEnv(task, run_folder, run_timeout)
    for tool in tools:
        env.add_tool(dg.Toolbox.get_tool(tool))
    return env


def _command_environment(run_folder: Path) -> dict[str, str]:
    for name in ("home", "tmp"):
        (run_folder / name).mkdir(exist_ok=True)
    return {
        # `python` must be this interpreter, which has pytest, and not whatever the caller's PATH says.
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(run_folder / "home"),
        "TMPDIR": str(run_folder / "tmp"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
        "COLUMNS": "100",
        "PYTHONHASHSEED": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(run_folder),
        RUN_MARKER: str(run_folder),
    }


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace").replace("\r\n", "\n")
