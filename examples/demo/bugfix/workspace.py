"""A copy of the buggy program in a temporary folder, and the tools an agent has there. They really run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

PROGRAM = Path(__file__).parent.parent / "program"
TEST_SECONDS = 60.0
_CONTEXT_LINES = 3
_NOT_TOLD = re.compile(r"^(Ran \d+ tests?) in [\d.]+s$", re.MULTILINE)
"""How long the tests took differs from run to run; all arms should read the same."""


def _function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _function("list_files", "List the files of the project with their sizes."),
    _function("read_file", "Read a whole file.", path="relative path"),
    _function(
        "edit_file",
        "Replace one piece of a file. The old text must occur exactly once.",
        path="relative path",
        old="text to replace",
        new="text to put there",
    ),
    _function("run_tests", "Run the test suite."),
]


class ToolError(Exception):
    """The tool could not do what it was asked for; the text is what the agent gets to read."""


class Workspace:
    """The program's folder, for as long as a ``with`` block lasts."""

    def __init__(self, program: Path = PROGRAM) -> None:
        self._program = program
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.root = Path()

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="leyline-demo-")
        self.root = Path(self._folder.name).resolve()
        shutil.copytree(self._program, self.root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        return self

    def __exit__(self, *exc: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def call(self, tool: str, arguments: dict[str, str]) -> str:
        """What the tool answers; an error is an answer too."""
        try:
            return str(getattr(self, f"_{tool}")(**arguments))
        except ToolError as error:
            return f"Error: {error}"

    def tests_pass(self) -> bool:
        """Whether the test suite is green now."""
        return self._test_run().returncode == 0

    def _path(self, path: str) -> Path:
        found = (self.root / path).resolve()
        if not found.is_relative_to(self.root) or not found.is_file():
            raise ToolError(f"no such file: {path}")
        return found

    def _list_files(self) -> str:
        files = sorted(path for path in self.root.rglob("*.py"))
        return "\n".join(
            f"{path.relative_to(self.root).as_posix():<24}{path.stat().st_size:>6} bytes" for path in files
        )

    def _read_file(self, path: str) -> str:
        return self._path(path).read_text(encoding="utf-8")

    def _edit_file(self, path: str, old: str, new: str) -> str:
        file = self._path(path)
        text = file.read_text(encoding="utf-8")
        if (count := text.count(old)) != 1:
            raise ToolError(f"the old text occurs {count} times in {path}, not once")
        file.write_text(text.replace(old, new), encoding="utf-8")
        line = text[: text.index(old)].count("\n")
        lines = text.replace(old, new).splitlines()
        shown = range(max(0, line - _CONTEXT_LINES), min(len(lines), line + new.count("\n") + _CONTEXT_LINES + 1))
        return "\n".join([f"Edited {path}:", *(f"{number + 1:>4}  {lines[number]}" for number in shown)])

    def _run_tests(self) -> str:
        done = self._test_run()
        text = (done.stdout + done.stderr).replace(f"{self.root}{os.sep}", "")
        return _NOT_TOLD.sub(r"\1", text).strip() + f"\nexit code {done.returncode}"

    def _test_run(self) -> subprocess.CompletedProcess[str]:
        """unittest in a process of its own: without site-packages, and without leaving byte code behind."""
        command = [sys.executable, "-B", "-s", "-m", "unittest", "discover", "-t", ".", "-s", "tests"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            return subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ToolError(f"the tests did not end within {TEST_SECONDS:.0f} s") from None
