"""Tests that need an interpreter and pins of their own: each file of them runs there, as one test here.

With the environment that runs this file (openai 2.8, SGLang's own pin) they are also the matrix of openai releases.
"""

import os
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent

ELSEWHERE = [
    *(("EVALS_PYTHON", f"evals/{path.name}") for path in sorted((HERE / "evals").glob("gym_*.py"))),
    ("FRAMEWORKS_PYTHON", "client/test_frameworks.py"),
]
FACING_OPENAI = [f"client/test_{name}.py" for name in ("session", "async_session", "openai_client", "surface")]
"""Where the client meets the openai package: types, objects, errors, streams; with mypy installed also statically."""
RELEASES = [("EVALS_PYTHON", "1.99."), ("FRAMEWORKS_PYTHON", "3.")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("variable", "name"), ELSEWHERE, ids=[name for _, name in ELSEWHERE])
def test_in_its_own_environment(variable: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    closing = run(interpreter(variable), [name])
    with capsys.disabled():
        print(f"\n{name}: {closing}")


@pytest.mark.parametrize(("variable", "release"), RELEASES, ids=[f"openai {release}x" for _, release in RELEASES])
def test_the_client_with_another_openai(variable: str, release: str, capsys: pytest.CaptureFixture[str]) -> None:
    python = interpreter(variable)
    asked = [python, "-c", "import openai; print(openai.__version__)"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert version.startswith(release)
    closing = run(python, FACING_OPENAI)
    with capsys.disabled():
        print(f"\nopenai {version}: {closing}")


@pytest.mark.skipif(find_spec("sglang") is None, reason="only the server environment pins SGLang's openai")
def test_this_environment_is_the_matrix_s_middle() -> None:
    import openai

    assert openai.__version__.startswith("2.8.")


@pytest.mark.server
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs the server environment")
def test_frameworks_against_the_embedded_server(capsys: pytest.CaptureFixture[str]) -> None:
    """A grammar backend, which the embedded server has none of by itself, makes a random model call tools."""
    from leyline_server_ext.embedded import EmbeddedServer

    python = interpreter("FRAMEWORKS_PYTHON")
    with EmbeddedServer("tiny-gqa", dtype="float32", extra_args=["--grammar-backend", "xgrammar"]) as server:
        closing = run(python, ["client/frameworks_served.py"], LEYLINE_SERVER_URL=server.base_url)
    assert "skipped" not in closing
    with capsys.disabled():
        print(f"\nframeworks over SGLang: {closing}")


@pytest.mark.server
@pytest.mark.skipif(find_spec("sglang") is None, reason="needs the server environment")
def test_debug_gym_against_the_embedded_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripted actions, so any model will do that has room for the longest unedited conversation."""
    from leyline_server_ext.embedded import EmbeddedServer

    python = interpreter("EVALS_PYTHON")
    with EmbeddedServer("tiny-chat", context_length=32_768, max_total_tokens=131_072) as server:
        closing = run(python, ["evals/served_gym.py"], LEYLINE_SERVER_URL=server.base_url)
    assert "skipped" not in closing
    with capsys.disabled():
        print(f"\ndebug-gym over SGLang: {closing}")


def interpreter(variable: str) -> str:
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} is unset: `make test` sets it where Python 3.12 is found")
    return python


def run(python: str, names: Sequence[str], **variables: str) -> str:
    """Run test files there. Returns the closing line of pytest; a failure fails with all it printed."""
    # PYTHONPATH would bring this environment's packages along.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in names)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    closing = done.stdout.rstrip().rpartition("\n")[2]
    assert " passed" in closing
    return closing
