"""The public surface, pinned: changing it is a decision, not an accident."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import leyline_client
from leyline_client import Directive, Edit, _errors
from leyline_client import testing as doubles

HERE = Path(__file__).parent


def test_the_public_names() -> None:
    assert sorted(leyline_client.__all__) == (HERE / "surface.txt").read_text().split()
    for name in leyline_client.__all__:
        assert getattr(leyline_client, name) is not None
    assert {"FakeServer", "Fault", "ScriptedPolicy", "UnconsumedSteps", "tool_call"} <= set(doubles.__all__)


def test_every_error_is_public() -> None:
    def tree(cls: type[Exception]) -> list[str]:
        return [cls.__name__, *(name for sub in cls.__subclasses__() for name in tree(sub))]

    own = {name for name in tree(_errors.LeylineError) if hasattr(_errors, name)}
    assert own <= set(leyline_client.__all__)


@pytest.mark.parametrize("model", [Directive, Edit], ids=lambda model: model.__name__)
def test_the_schemas_on_the_wire(model: type[Directive] | type[Edit]) -> None:
    kept = json.loads((HERE / f"{model.__name__.lower()}.schema.json").read_text())
    assert model.model_json_schema() == kept


TYPED = """
from collections.abc import AsyncIterator
from typing import assert_type
from openai import AsyncOpenAI, AsyncStream, OpenAI, Stream
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from leyline_client import AsyncLeylineSession, LeylineSession, Receipt, TurnResult, leyline_of

session = LeylineSession("http://h", policies=["truncate-older-than-n", ("token-budget", {"target": 1})], mode="forget")
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
reply = session.chat.completions.create(model="m", messages=messages)
assert_type(reply, ChatCompletion)
assert_type(session.chat.completions.create(model="m", messages=messages, stream=True), Stream[ChatCompletionChunk])
assert_type(session.conversation("k").chat.completions.create(model="m", messages=messages), ChatCompletion)
assert_type(leyline_of(reply), TurnResult)
assert_type(session.last, Receipt | None)
assert_type(session.openai, OpenAI)

async def main() -> None:
    session = AsyncLeylineSession("http://h")
    assert_type(await session.chat.completions.create(model="m", messages=messages), ChatCompletion)
    stream = await session.chat.completions.create(model="m", messages=messages, stream=True)
    assert_type(stream, AsyncStream[ChatCompletionChunk])
    assert_type(session.openai, AsyncOpenAI)

session.chat.completions.create(model="m", messages=3)  # type: ignore[call-overload]
LeylineSession("http://h", strategy="maybe")  # type: ignore[arg-type]
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_create_has_openais_types_under_mypy_strict(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    root = HERE.parents[1]
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(root / "pyproject.toml")]
    command += ["--cache-dir", str(tmp_path / "cache"), str(tmp_path / "typed.py")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_is_light() -> None:
    code = "import sys, leyline_client; print(sorted({'openai', 'tiktoken', 'starlette'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
