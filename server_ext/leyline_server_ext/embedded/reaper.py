"""A small process between the embedded server and whoever started it, so that nothing is ever left running.

Run as a script (standard library only): ``reaper.py PARENT_PID GRACE_SECONDS WORK_DIR -- COMMAND...``. It starts the
command, adopts every orphan the command leaves (``PR_SET_CHILD_SUBREAPER``), and ends all of them when the command
exits, when it is told to stop (SIGTERM, SIGINT), or when the parent is gone, however it went: SIGKILL leaves no time
for a handler in the parent, whose work folder is then removed as well. The parent is watched by its pid, not with
``PR_SET_PDEATHSIG``, which fires when a mere *thread* ends.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.25
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def descendants(pid: int) -> list[int]:
    """Pids of all living processes below `pid`, parents before children. Zombies do not count."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]  # the name before it may hold blanks and brackets
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def _kill_descendants() -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap() -> bool:
    """Collect what has ended; True once there is no child left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False


def _end_all(server: "subprocess.Popen[bytes]", grace_seconds: float) -> None:
    """Interrupt the server, as Ctrl-C would, then kill whatever is left below this process.

    SGLang needs a second after SIGINT; after SIGTERM it sits in a five-second poll first.
    """
    if server.poll() is None and grace_seconds > 0:
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(grace_seconds)
    while not _reap():
        _kill_descendants()
        time.sleep(0.02)


def _supervise(parent: int, grace_seconds: float, work_dir: Path, command: Sequence[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)

    def in_child() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
        signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should the reaper itself be killed; it has one thread

    server = subprocess.Popen(command, preexec_fn=in_child)
    code: int | None = None
    while code is None and os.getppid() == parent:
        received = signal.sigtimedwait(_WATCHED, _POLL_SECONDS)
        code = server.poll()
        if received is not None and received.si_signo != signal.SIGCHLD:
            break
    _end_all(server, grace_seconds if os.getppid() == parent else 0.0)
    if os.getppid() != parent:
        shutil.rmtree(work_dir, ignore_errors=True)
    if code is None:
        return 0
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_supervise(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[5:]))
