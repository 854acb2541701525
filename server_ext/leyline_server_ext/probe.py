"""Diagnostics: write the KV rows of finished requests to files, for comparing with an oracle.

Off unless ``LEYLINE_DUMP_DIR`` names a folder when the server starts. The files hold KV, from which text can be
recovered: for test servers only.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from pathlib import Path
from typing import Any

import torch

from . import compat

VARIABLE = "LEYLINE_DUMP_DIR"
KEPT_FILES = 16
"""Newest dumps kept: a test server answers thousands of requests."""


class Dump:
    """Writes ``{"ids", "k", "v"}`` per finished request: tokens fed, K (or MLA rows), V: ``(layers, tokens, ...)``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self._written: deque[Path] = deque()

    def __call__(self, cache: Any, req: Any, up_to: int) -> None:
        """Dump the first ``up_to`` tokens of ``req``."""
        slots, ids = compat.rows_of(cache, req, up_to)
        pool = compat.kv_pool(cache)
        if compat.pool_kind(pool) == "mla":
            rows = {"k": torch.stack([buffer[slots] for buffer in pool.kv_buffer]), "v": None}
        else:
            rows = {
                "k": torch.stack([buffer[slots] for buffer in pool.k_buffer]),
                "v": torch.stack([buffer[slots] for buffer in pool.v_buffer]),
            }
        target = self._folder / f"{os.getpid()}-{next(self._numbers):06d}.pt"
        part = target.with_suffix(".part")
        torch.save({"ids": ids, **rows}, part)
        part.rename(target)
        self._written.append(target)
        if len(self._written) > KEPT_FILES:
            self._written.popleft().unlink(missing_ok=True)


def from_environment() -> Dump | None:
    """The probe the environment asks for, if any."""
    folder = os.environ.get(VARIABLE)
    return None if not folder else Dump(Path(folder))
