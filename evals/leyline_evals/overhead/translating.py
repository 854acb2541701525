"""In-process: what it costs to turn a radix key into a lineage-tagged one, and to see that one needs no tags."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable
from statistics import median
from typing import Any

from leyline_server_ext import compat
from leyline_server_ext.cache import Translators
from leyline_server_ext.lineage import Lineage
from leyline_server_ext.orders import Sealer

TOKENS = 32_000
_ROUNDS = 21


def measure() -> dict[str, Any]:
    """Microseconds per key of `TOKENS` tokens: untagged (no lineage), and tagged from position 600 on.

    ``tagged_first_us`` is the first translation under a lineage the process has not seen, ``tagged_us`` each later one.

    Raises:
        ImportError: SGLang is not installed here.
    """
    sealer = Sealer(secrets.token_bytes(32))
    translators = Translators(sealer)
    key_class = compat.tree().RadixKey
    tokens = array("q", range(TOKENS))
    plain = key_class(tokens, None)
    fresh = [_lineage(sealer, number) for number in range(_ROUNDS)]
    first = [key_class(tokens, extra) for extra in fresh]
    return {
        "tokens": TOKENS,
        "untagged_us": _microseconds(lambda: translators.key(plain), 2_000),
        "tagged_first_us": round(1e6 * median(_once(translators, key) for key in first), 2),
        "tagged_us": _microseconds(lambda: translators.key(first[-1]), 20),
    }


def _lineage(sealer: Sealer, number: int) -> str:
    sealed = sealer.seal_lineage(Lineage(((600, 2 * number + 1),), 20_000), None, None)
    assert sealed is not None
    return sealed


def _once(translators: Translators, key: Any) -> float:
    began = time.perf_counter()
    translators.key(key)
    return time.perf_counter() - began


def _microseconds(call: Callable[[], object], repeats: int) -> float:
    """Median over rounds of the mean of ``repeats`` calls."""
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        taken.append(1e6 * (time.perf_counter() - began) / repeats)
    return round(median(taken), 3)
