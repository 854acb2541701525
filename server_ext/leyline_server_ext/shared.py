"""What the server's processes share: a key for seals, and facts the scheduler knows and the HTTP process tells.

Both go through the environment of the main process, which its children inherit: no new channel between them.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

KEY_VARIABLE = "LEYLINE_KEY"
"""Hex key (32 bytes or more) for seals. Set it yourself only for servers that span hosts: all need the same one."""
FACTS_VARIABLE = "LEYLINE_FACTS"


def prepare(is_main: bool) -> None:
    """Make key and facts folder known to this process's children; only the main process makes new ones."""
    if is_main and KEY_VARIABLE not in os.environ:
        os.environ[KEY_VARIABLE] = secrets.token_hex(32)
    if is_main and FACTS_VARIABLE not in os.environ:
        os.environ[FACTS_VARIABLE] = str(
            Path(tempfile.gettempdir()) / f"leyline-{os.getpid()}-{secrets.token_hex(4)}.json"
        )


def key() -> bytes:
    """The shared key.

    Raises:
        RuntimeError: the variable is missing or too short to be a key.
    """
    value = bytes.fromhex(os.environ.get(KEY_VARIABLE, ""))
    if len(value) < 16:
        raise RuntimeError(f"{KEY_VARIABLE} must hold at least 16 bytes in hex")
    return value


def write_facts(facts: dict[str, Any]) -> None:
    """Leave what the scheduler found out about pool and model (whole or not at all)."""
    path = Path(os.environ[FACTS_VARIABLE])
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(facts))
    part.replace(path)


def read_facts() -> dict[str, Any] | None:
    """What the scheduler left, or None before it did."""
    try:
        facts: dict[str, Any] = json.loads(Path(os.environ[FACTS_VARIABLE]).read_text())
    except (KeyError, OSError, ValueError):
        return None
    return facts


def remove_facts() -> None:
    """Clean up at the end of the main process."""
    Path(os.environ.get(FACTS_VARIABLE, "")).unlink(missing_ok=True)
