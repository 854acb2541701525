"""A server of two ranks that leave their KV rows in files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from leyline_server_ext.embedded import EmbeddedServer
from tests.oracle import Oracle
from tests.server.rows import RowServer


class Ranks(RowServer):
    """A server of two ranks whose rows say which rank they come from: their files carry its process id."""

    def __init__(self, running: EmbeddedServer, dumps: Path, oracle: Oracle, *, split: bool) -> None:
        super().__init__(running.base_url, dumps, oracle)
        self.split = split
        """The ranks share each token's heads."""
        titles = {_title(pid): pid for pid in running.pids()}
        self.pids = [titles[f"sglang::scheduler_{'TP' if split else 'DP'}{rank}"] for rank in (0, 1)]

    def found(self, ids: list[int]) -> dict[int, Any]:
        """The newest dump of ``ids`` by process."""
        deadline = time.monotonic() + 10
        dumps: dict[int, Any] = {}
        while time.monotonic() < deadline and len(dumps) < (len(self.pids) if self.split else 1):
            for path in sorted(self.dumps.glob("*.pt")):
                try:
                    dump = torch.load(path)
                except FileNotFoundError:  # the server keeps only the newest
                    continue
                if dump["ids"] == ids:
                    dumps[int(path.name.partition("-")[0])] = dump
            time.sleep(0.02)
        return dumps

    def rows(self, ids: list[int]) -> tuple[Any, Any]:
        """K and V of ``ids``: of the one rank that has them, or both ranks' heads side by side."""
        found = self.found(ids)
        assert len(found) == (2 if self.split else 1)
        parts = [found[pid] for pid in self.pids if pid in found]
        return torch.cat([part["k"] for part in parts], 2), torch.cat([part["v"] for part in parts], 2)

    def rank(self, ids: list[int]) -> int:
        """Which process alone has the rows of ``ids``."""
        (pid,) = self.found(ids)
        return self.pids.index(pid)


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
