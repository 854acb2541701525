"""Keep this process and all its children from writing outside one folder, without docker or root.

Two mechanisms, tried in this order:

``landlock``
    Linux Landlock (kernel 5.13 or later; docker's default seccomp profile allows it). File contents and directory
    entries outside the folder can no longer be created, written, truncated, renamed or removed; it cannot be undone,
    also not by root. Not covered by Landlock: metadata (mode, owner, times, extended attributes), and nothing here
    limits reading, the network or signals.
``mount-namespace``
    A private mount namespace in which everything but the folder is read-only. Covers metadata too, but a program
    that runs as root could remount: it stops accidents, not attacks.

Both leave the usual devices (``/dev/null``, terminals) writable. Where neither works, :func:`confine` raises.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_SYS_MOUNT_SETATTR = 442
_PR_SET_NO_NEW_PRIVS = 38

# Landlock's access bits that change something: write, remove x2, make x7 (ABI 1), refer (2), truncate (3).
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGES_BY_ABI = {1: _WRITE_FILE | sum(1 << bit for bit in range(4, 13)), 2: 1 << 13, 3: _TRUNCATE}

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts")

MECHANISMS = ("landlock", "mount-namespace")


class ConfinementError(RuntimeError):
    """This system offers no way to keep a process inside a folder."""


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class _MountAttr(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def confine(folder: Path, mechanisms: tuple[str, ...] = MECHANISMS) -> str:
    """Confine this process, for good, to writing inside ``folder`` (which must exist). Returns the mechanism.

    Call it in a single-threaded process that was started for the purpose; file descriptors that are already open
    stay usable.

    Raises:
        ConfinementError: when none of ``mechanisms`` works here; the process should then end.
    """
    reasons = []
    for mechanism in mechanisms:
        try:
            {"landlock": _landlock, "mount-namespace": _mount_namespace}[mechanism](folder.resolve(strict=True))
        except OSError as error:
            reasons.append(f"{mechanism}: {error.strerror or error}")
        else:
            return mechanism
    raise ConfinementError("cannot keep tasks inside their folder on this system (" + "; ".join(reasons) + ")")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _landlock(folder: Path) -> None:
    libc = _libc()
    abi = _checked(libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "landlock")
    changes = sum(bits for since, bits in _CHANGES_BY_ABI.items() if since <= abi)
    handled = ctypes.c_uint64(changes)
    ruleset = _checked(
        libc.syscall(_SYS_LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0), "landlock_create_ruleset"
    )
    try:
        _allow(libc, ruleset, folder, changes)
        for device in _DEVICES:
            if os.path.exists(device):
                _allow(libc, ruleset, Path(device), changes & (_WRITE_FILE | _TRUNCATE))
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        _checked(libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(access, fd)
        _checked(libc.syscall(_SYS_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0), f"landlock_add_rule {path}")
    finally:
        os.close(fd)


def _mount_namespace(folder: Path) -> None:
    libc = _libc()
    if os.geteuid() == 0:
        _checked(libc.unshare(_CLONE_NEWNS), "unshare")
    else:
        uid, gid = os.geteuid(), os.getegid()
        _checked(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    target = os.fsencode(folder)
    _checked(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "make mounts private")
    _checked(libc.mount(target, target, None, ctypes.c_ulong(_MS_BIND), None), "bind the folder")
    _set_read_only(libc, b"/", True)
    _set_read_only(libc, target, False)


def _set_read_only(libc: ctypes.CDLL, path: bytes, read_only: bool) -> None:
    attr = _MountAttr(_MOUNT_ATTR_RDONLY, 0, 0, 0) if read_only else _MountAttr(0, _MOUNT_ATTR_RDONLY, 0, 0)
    flags = _AT_RECURSIVE if read_only else 0
    result = libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, ctypes.byref(attr), ctypes.c_size_t(ctypes.sizeof(attr))
    )
    _checked(result, "mount_setattr")
