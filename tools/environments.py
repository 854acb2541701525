"""Make the project's virtual environments: ``environments.py NAME`` prints the interpreter of a finished one.

An environment lives in ``.venvs/<name>-<hash>``, the hash taken over the lock files and the interpreter, so that an
unchanged one is found again at once and a changed one is never half updated. It is made under its final path (virtual
environments do not move), with a stamp written last; without the stamp it is thrown away and made again. The stamp
holds the hash of ``pyproject.toml``: when that changed, only this project's own metadata is installed again. Standard
library only; progress goes to stderr. Exit status 3: no interpreter of the needed version was found.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = ".finished"
NO_INTERPRETER = 3


@dataclass(frozen=True)
class Environment:
    """What goes into one environment.

    Attributes:
        requirements: pinned lists, installed together without resolving.
        versions: minor versions of Python 3 to look for, best first.
        size: what the user is told to expect.
    """

    requirements: tuple[str, ...]
    versions: tuple[int, ...]
    size: str


ENVIRONMENTS = {
    "server": Environment(
        ("requirements/server-cpu.txt", "requirements/dev.txt"), (11, 12, 13), "6.5 GB on disk, some minutes"
    ),
    "evals": Environment(("requirements/evals.txt",), (12, 13), "220 MB, less than a minute"),
    "frameworks": Environment(("requirements/frameworks.txt",), (12, 13), "150 MB, less than a minute"),
}


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def candidates(minor: int) -> Iterator[str]:
    """Places where an interpreter of Python 3.`minor` may be."""
    yield sys.executable
    on_path = shutil.which(f"python3.{minor}")
    if on_path:
        yield on_path
    for versions in (os.environ.get("PYENV_ROOT"), Path.home() / ".pyenv"):
        if versions:
            yield from map(str, sorted(Path(versions).glob(f"versions/3.{minor}.*/bin/python3.{minor}"), reverse=True))
    uv = shutil.which("uv")
    if uv:
        found = subprocess.run([uv, "python", "find", f"3.{minor}"], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            yield found.stdout.strip()


def usable(interpreter: str, minor: int) -> bool:
    """Whether it runs, has the version it claims, and can make virtual environments with pip."""
    probe = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, {minor}))"
    done = subprocess.run([interpreter, "-c", probe], capture_output=True, check=False)
    return done.returncode == 0


def find_interpreter(versions: tuple[int, ...]) -> str | None:
    """The first usable interpreter, preferring the earlier version."""
    for minor in versions:
        for interpreter in candidates(minor):
            if usable(interpreter, minor):
                return interpreter
    return None


def digest(*parts: bytes) -> str:
    """Twelve digits that stand for some content."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def build(folder: Path, environment: Environment, interpreter: str) -> None:
    """Fill `folder` from nothing, but for this project itself."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True, stdout=sys.stderr)
    lists = [part for name in environment.requirements for part in ("--requirement", str(ROOT / name))]
    # Compiling every module of every package takes longer than compiling on import what is used.
    install(folder, "--no-compile", "--progress-bar", "off", *lists)


def install(folder: Path, *what: str) -> None:
    """Run pip in `folder` without resolving."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, *what], check=True, stdout=sys.stderr)


def remove_older(name: str, current: Path) -> None:
    """Environments of earlier lists only cost disk."""
    for folder in current.parent.glob(f"{name}-*"):
        if folder != current and folder.is_dir():
            say(f"removing the outdated {folder.name}")
            shutil.rmtree(folder, ignore_errors=True)


def ensure(name: str) -> Path:
    """Interpreter of the environment `name`, which is made if needed."""
    environment = ENVIRONMENTS[name]
    interpreter = find_interpreter(environment.versions)
    if interpreter is None:
        wanted = " or ".join(f"3.{minor}" for minor in environment.versions)
        say(f"no Python {wanted} with venv and pip found (looked at PATH, pyenv and uv)")
        sys.exit(NO_INTERPRETER)
    lists = [(ROOT / requirements).read_bytes() for requirements in environment.requirements]
    folder = ROOT / ".venvs" / f"{name}-{digest(interpreter.encode(), *lists)}"
    own = digest((ROOT / "pyproject.toml").read_bytes())
    stamp = folder / STAMP
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = time.monotonic()
        if not stamp.is_file():
            say(f"making the {name} environment with {interpreter} ({environment.size})")
            build(folder, environment, interpreter)
            stamp.touch()
        elif stamp.read_text() == own:
            return folder / "bin" / "python"
        install(folder, "--quiet", "--editable", str(ROOT))
        stamp.write_text(own)
        remove_older(name, folder)
        say(f"the {name} environment is ready after {time.monotonic() - began:.0f} s")
    return folder / "bin" / "python"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ENVIRONMENTS:
        sys.exit(f"usage: environments.py {'|'.join(ENVIRONMENTS)}")
    try:
        print(ensure(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"making the {sys.argv[1]} environment failed: {' '.join(map(str, error.cmd))}")
