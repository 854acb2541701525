"""What the memory of this machine gives: plain copies within as much memory as a KV pool has, timed in a process of
their own. Each is of bytes that were not touched for long, as the KV of a session is not: the same few megabytes copied
again and again would be timed in the processor's cache.

``python -m leyline_evals.bench.copying BYTES...`` prints one JSON list of milliseconds, one per size.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

_REPEATS = 7
_POOL_BYTES = 512 * 1024**2


def copy_ms(sizes: Sequence[int]) -> list[float]:
    """Median milliseconds of a plain torch copy of as many bytes, in a process of its own.

    Raises:
        RuntimeError: the process failed; the message ends with what it said.
    """
    command = [sys.executable, "-m", __name__, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the plain copy could not be timed: {done.stderr.strip()[-500:]}")
    values: list[float] = json.loads(done.stdout)
    return values


def _times(sizes: Sequence[int]) -> list[float]:
    import torch

    longest = max(sizes) // 4
    source, target = (torch.ones(max(_POOL_BYTES // 4, longest), dtype=torch.float32) for _ in range(2))
    medians, at = [], 0
    for size in sizes:
        taken, count = [], size // 4
        for _ in range(_REPEATS):
            at = at if at + count <= len(source) else 0
            began = time.perf_counter()
            target[at : at + count].copy_(source[at : at + count])
            taken.append(1e3 * (time.perf_counter() - began))
            at += count
        medians.append(median(taken))
    return medians


if __name__ == "__main__":
    print(json.dumps(_times([int(size) for size in sys.argv[1:]])))
