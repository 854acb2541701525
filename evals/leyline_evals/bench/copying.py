"""What the memory of this machine gives: a plain copy, timed in a process like the server's.

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


def _time(size: int) -> float:
    import torch

    source, target = (torch.ones(size // 4, dtype=torch.float32) for _ in range(2))
    taken = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        target.copy_(source)
        taken.append(1e3 * (time.perf_counter() - began))
    return median(taken)


if __name__ == "__main__":
    print(json.dumps([_time(int(size)) for size in sys.argv[1:]]))
