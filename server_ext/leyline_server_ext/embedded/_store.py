"""A folder of finished artefacts: each is made in a temporary folder and appears under its name in one step."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from leyline_server_ext.embedded.errors import ModelError


def cache_root() -> Path:
    """``$LEYLINE_CACHE``, else ``$XDG_CACHE_HOME/leyline``, else ``~/.cache/leyline``."""
    own = os.environ.get("LEYLINE_CACHE")
    if own:
        return Path(own).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leyline"


def ensure(name: str, make: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """Path of the artefact `name`; `make` fills an empty folder when it is not there yet.

    Raises:
        ModelError: `make` failed or the cache folder cannot be written; nothing half-made is left under the name.
    """
    final = cache_root() / "models" / name
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_name(f".{name}.lock"), progress):
            if not final.is_dir():
                _make_aside(final, make)
    except OSError as error:
        raise ModelError(f"cannot prepare model {name} in {final.parent}: {error}") from error
    return final


def _make_aside(final: Path, make: Callable[[Path], None]) -> None:
    for leftover in final.parent.glob(f".{final.name}.making-*"):  # of a process that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.making-", dir=final.parent))
    try:
        make(aside)
        aside.chmod(0o755)
        aside.rename(final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold an advisory lock that the kernel drops when its holder dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that holds {path.name}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
