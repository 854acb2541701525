"""mini_nightmare's task folders, copied from the installed debug-gym wheel and repaired.

The wheel drops three things that the tasks need: ``.debugignore``, ``.debugreadonly`` (without it ``test.py`` can be
edited) and ``patcher/source_code.txt``. All three are restored here.
"""

from __future__ import annotations

import ast
import importlib.metadata
import shutil
from pathlib import Path

from leyline_evals.gym.tasks import check_tasks

_IGNORE = "__pycache__/\n.pytest_cache/\n.git/\n.debugignore\n.debugreadonly\n"
_READ_ONLY = "*test*.py\n"


class TaskDataError(RuntimeError):
    """The installed debug-gym does not hold the task data that was expected."""


def prepare_task(task: str, target: Path) -> Path:
    """Write the repaired folder of ``task`` to ``target`` (created; must not exist yet) and return it.

    Raises:
        UnknownTaskError: for a task that does not exist or cannot run offline.
        TaskDataError: when the wheel's data is not where debug-gym 1.3.0 has it.
    """
    check_tasks([task])
    source = _wheel_folder() / task
    if not (source / "test.py").is_file():
        raise TaskDataError(f"debug-gym's data has no test.py for {task}")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    (target / ".debugignore").write_text(_IGNORE)
    (target / ".debugreadonly").write_text(_READ_ONLY)
    if task == "patcher":
        (target / "source_code.txt").write_text(_patcher_source((target / "test.py").read_text()))
    return target


def _wheel_folder() -> Path:
    folder = Path(str(importlib.metadata.distribution("debug-gym").locate_file("data/mini_nightmare")))
    if not folder.is_dir():
        raise TaskDataError("the installed debug-gym has no data/mini_nightmare")
    return folder


def _patcher_source(test_code: str) -> str:
    """Rebuild the text that patcher's tests rewrite.

    The first test replaces lines 4 to 6 and so shows lines 1 to 3; the second replaces line 1 and so shows lines 2 to
    6. The file ends without a newline, as both expected outputs do.
    """
    expected = [
        node.value.value
        for node in ast.walk(ast.parse(test_code))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "expected_output"
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    if len(expected) < 2:
        raise TaskDataError("patcher's tests are not those of debug-gym 1.3.0")
    first_line = expected[0].split("\n")[0]
    return "\n".join([first_line, *expected[1].split("\n")[1:]])
