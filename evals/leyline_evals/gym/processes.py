"""Child processes for runs: forked from a clean server process, and cleaned up after by marker."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class ChildDiedError(RuntimeError):
    """A child process ended without an answer."""


def forkserver() -> ForkServerContext:
    """A context whose children are forked from one single-threaded process that has debug-gym imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["leyline_evals.gym.worker"])
    return context


def run_in_child(function: Callable[..., T], *arguments: Any) -> T:
    """Call a module-level ``function`` in a child process and return its result; its exception is raised here.

    Raises:
        ChildDiedError: when the child ends without either.
    """
    context = forkserver()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        failed, value = receiver.recv()
    except EOFError:
        process.join()
        raise ChildDiedError(f"child ended with status {process.exitcode}") from None
    finally:
        if process.is_alive():
            process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()
    if failed:
        raise value
    return value


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sender.send((False, function(*arguments)))
    except Exception as error:
        sender.send((True, error))


def kill_marked(marker: str, folder: Path) -> int:
    """Kill every process whose environment variable ``marker`` names ``folder`` or something below it.

    Commands that a task put into the background survive their shell, and debug sessions live in a session of their
    own; the marker, inherited by all of them, finds them. Returns how many were killed.
    """
    wanted = f"{marker}={folder.resolve()}".encode()
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(item == wanted or item.startswith(wanted + b"/") for item in variables):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
        except (OSError, ProcessLookupError):
            continue
    return killed
