"""Make an observation the same on every run and every machine.

The only rewriting done anywhere: paths of this run and this interpreter, durations, addresses and thread idents.
The agent sees the working folder as ``/testbed``, the name it has in debug-gym's own container.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKING_FOLDER = "/testbed"

_HEADER_LINES = re.compile(r"^(?:platform|rootdir:|configfile:|plugins:|cachedir:) ?.*\n", re.MULTILINE)
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = (
    # pytest pads this line to the terminal's width, so its length would depend on the duration's digits.
    (re.compile(r"^=+ (.*) in \d+\.\d+s(?: \(\d+:\d\d:\d\d\))? =+$", re.MULTILINE), r"==== \1 in 0.00s ===="),
    (re.compile(r"\b(in|Ran \d+ tests? in) \d+\.\d+ ?s\b"), r"\1 0.00s"),
    (re.compile(r"^(real|user|sys)\t\d+m[\d.]+s$", re.MULTILINE), r"\1\t0m0.000s"),
    (re.compile(r"\b0x[0-9a-f]{8,16}\b"), "0x7f0000000000"),
    (re.compile(r"\b1[2-4]\d{13}\b"), "140000000000000"),
)


def stable_text(text: str, paths: dict[str, str]) -> str:
    """Rewrite ``text``: every key of ``paths`` becomes its value (longest first), then the volatile rest."""
    for real in sorted(paths, key=len, reverse=True):
        text = text.replace(real, paths[real])
    text = _HEADER_LINES.sub("", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def interpreter_paths() -> dict[str, str]:
    """This interpreter's folders -> the ones they have in an ordinary container."""
    paths = {}
    for real in (sys.base_prefix, sys.prefix):
        paths[real] = "/usr/local"
        paths[str(Path(real).resolve())] = "/usr/local"
    return {real: shown for real, shown in paths.items() if real not in ("/", "/usr", "/usr/local")}


def map_strings(value: Any, rewrite: Callable[[str], str]) -> Any:
    """Apply ``rewrite`` to every string inside a JSON value; keys are left alone."""
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, list):
        return [map_strings(item, rewrite) for item in value]
    if isinstance(value, dict):
        return {key: map_strings(item, rewrite) for key, item in value.items()}
    return value
