"""Which mini_nightmare tasks there are, and which of them are used. Imports nothing but the standard library."""

from __future__ import annotations

from collections.abc import Iterable

DEBUG_GYM_VERSION = "1.3.0"
"""The release whose data and behaviour everything here was checked on."""

ALL_TASKS = (
    "config",
    "counter",
    "grader",
    "pandas_dataframe",
    "patcher",
    "purr",
    "scientific_calculator",
    "shopping_cart",
    "sum_tree",
    "tomorrow_date",
)

ONLINE_ONLY = {"pandas_dataframe": "its code downloads a CSV file when it runs"}
"""Task -> why it cannot run without a network."""

OFFLINE_TASKS = tuple(task for task in ALL_TASKS if task not in ONLINE_ONLY)

NEEDS_RESTORED_FILE = {"patcher": "the wheel lacks source_code.txt; it is rebuilt from the task's own tests"}
"""Task -> what had to be repaired before it can be solved."""

DEFAULT_TASKS = tuple(task for task in OFFLINE_TASKS if task not in NEEDS_RESTORED_FILE)
"""The default eight: every task that can be solved offline from the published wheel as it is.

The Leyline paper reports eight mini_nightmare tasks without naming them; this choice is ours and is configurable.
"""


class UnknownTaskError(ValueError):
    """A task name that mini_nightmare does not have, or one that needs a network."""


def check_tasks(tasks: Iterable[str]) -> tuple[str, ...]:
    """Return ``tasks`` as a tuple after checking that each exists, can run offline and is named once.

    Raises:
        UnknownTaskError: naming the offending task and the choices.
    """
    chosen = tuple(tasks)
    for task in chosen:
        if task in ONLINE_ONLY:
            raise UnknownTaskError(f"task {task!r} cannot run offline: {ONLINE_ONLY[task]}")
        if task not in ALL_TASKS:
            raise UnknownTaskError(f"unknown task {task!r}; choose from {', '.join(OFFLINE_TASKS)}")
    if len(set(chosen)) != len(chosen):
        raise UnknownTaskError(f"a task is named twice in {', '.join(chosen)}")
    if not chosen:
        raise UnknownTaskError("no task given")
    return chosen
