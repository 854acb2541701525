"""A server that leaves its KV rows in files, and the check of one batch of directives against the oracle."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.oracle import Oracle, State, relative_l2

LENGTH = 240

BATCHES: dict[str, list[tuple[int, int, list[int]]]] = {
    "deletion": [(100, 150, [])],
    "insertion": [(90, 90, [5, 6, 7, 8])],
    "replacement": [(60, 100, [9, 10, 11])],
    "longer replacement": [(60, 64, [9, 10, 11, 12, 13, 14, 15, 16])],
    "same length": [(60, 63, [9, 10, 11])],
    "touches the start": [(0, 30, [])],
    "replaces the start": [(0, 30, [4, 5])],
    "touches the end": [(200, LENGTH, [])],
    "four in one batch": [(0, 10, []), (40, 40, [5, 6, 7]), (80, 90, list(range(20, 35))), (LENGTH - 20, LENGTH, [])],
    "four, adjacent": [(20, 30, [3, 4]), (30, 40, []), (100, 101, [8, 9]), (150, 180, [1])],
}


class RowServer:
    """A tiny model in fp32 whose finished requests leave their KV rows in a folder."""

    def __init__(self, url: str, dumps: Path, oracle: Oracle) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)
        self.dumps, self.oracle = dumps, oracle

    def splice(self, **body: Any) -> dict[str, Any]:
        body.setdefault("sampling_params", {"max_new_tokens": 1})
        reply = self.http.post("/leyline/v1/splice", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def rows(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """K and V of the newest finished request that was fed exactly ``ids``."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for path in sorted(self.dumps.glob("*.pt"), reverse=True):
                try:
                    dump = torch.load(path)
                except FileNotFoundError:  # the server keeps only the newest
                    continue
                if dump["ids"] == ids:
                    return dump["k"], dump["v"]
            time.sleep(0.05)
        raise AssertionError("the request left no rows")


def tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=count)


def check_batch(server: RowServer, name: str) -> dict[str, Any]:
    """Splice batch ``name`` and hold every row and the answer against the oracle; the receipt."""
    edits = BATCHES[name]
    prompt, tail = tokens(name, LENGTH), tokens("tail" + name, 7)
    first = server.splice(append=prompt)
    source = prompt + first["output_ids"]
    directives = [{"start": s, "end": e, "replacement": r} for s, e, r in edits]
    second = server.splice(session=first["session"], directives=directives, append=tail)
    assert second["receipt"]["reason"] is None, second["receipt"]

    target = edited(source, edits)[0] + tail
    wanted, logits = server.oracle.splice(source, LENGTH, edits, tail)
    assert_rows(server, target, wanted)
    assert second["output_ids"] == [int(logits.argmax())]
    return dict(second["receipt"])


def edited(prompt: list[int], edits: list[tuple[int, int, list[int]]]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """``prompt`` after ``edits``, and what they keep of it as ``(start, end, new start)``."""
    target: list[int] = []
    kept = []
    position = 0
    for start, end, replacement in [*edits, (len(prompt), len(prompt), [])]:
        if start > position:
            kept.append((position, start, len(target)))
        target += prompt[position:start] + replacement
        position = end
    return target, kept


def assert_rows(server: RowServer, ids: list[int], wanted: State) -> None:
    """Every K and V row of the request that was fed ``ids`` equals ``wanted``'s."""
    found_k, found_v = server.rows(ids)
    wanted_k, wanted_v = server.oracle.rows(wanted)
    assert relative_l2(found_k, wanted_k) < 1e-5
    # Row by row too: one wrong row among many must not hide in the sum.
    worst = ((found_k - wanted_k).flatten(2).norm(dim=2) / wanted_k.flatten(2).norm(dim=2)).max()
    assert float(worst) < 5e-5
    if wanted_v is not None and found_v is not None:
        assert relative_l2(found_v, wanted_v) < 1e-5
