"""What the scheduler side costs: ``python tests/ext/bench_graft.py``. Prints a table, asserts nothing.

Medians of repeated runs in one process, CPU. ``rest`` is an admission that grafts, less its kernel and less the same
match on SGLang's own: keys, matching, paths, opening the order, allocation, insertion and the report.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "server_ext")]
if importlib.util.find_spec("sgl_kernel") is None:
    sys.path.append(str(HERE.parents[2] / "server_ext" / "leyline_server_ext" / "embedded" / "stand_in"))

SHAPES = {"SmolLM2-135M (30 x 3 x 64, bf16)": "mha", "DeepSeek-V2-Lite (27 x 576, bf16)": "mla"}


def median_us(work: Callable[[], object], repeat: int = 51) -> float:
    """Median microseconds of one call."""
    spent = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        spent.append(time.perf_counter() - started)
    return 1e6 * statistics.median(spent)


def keys() -> None:
    """Translating keys."""
    from leyline_server_ext.lineage import KeyTranslator, Lineage

    tokens = array("q", range(32_000))
    lineages = {n: Lineage(tuple((100 + 40 * i, 7 + i) for i in range(n)), 100 + 40 * n).ended() for n in (1, 500)}
    for count, lineage in lineages.items():
        warm = KeyTranslator(lineage)
        warm.tagged(tokens)
        print(f"key of 32,000 tokens, {count} operations: {median_us(lambda w=warm: w.tagged(tokens)):9.1f} us")
        first = median_us(lambda found=lineage: KeyTranslator(found).tagged(tokens), 11)
        print(f"  the first time for a lineage:          {first:9.1f} us")
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from leyline_server_ext.cache import Translators
    from leyline_server_ext.orders import Sealer

    translators, key = Translators(Sealer(b"k")), RadixKey(tokens)
    print(f"untagged key:                            {median_us(lambda: translators.key(key), 1001):9.2f} us")


def orders() -> None:
    """Sealing and opening."""
    from leyline_server_ext.lineage import Lineage
    from leyline_server_ext.orders import Candidate, Drop, Order, Piece, Sealer, Source

    sealer = Sealer(b"k")
    for size in (5_000, 64_000):
        source = Source(np.arange(size), Lineage())
        order = Order((source,), (Piece(10, size - 100, (Candidate(0, 110, 0),)),), (), (Drop(0, 10),), True)
        sealed = sealer.seal_order(order, None)
        seal = median_us(lambda o=order: sealer.seal_order(o, None))
        opened = median_us(lambda s=sealed: sealer.open_order(s, None))
        print(f"order with a source of {size:6,d} tokens: seal {seal:8.1f} us, open {opened:8.1f} us")


def world(kind: str, tokens: int) -> Any:
    """A scheduler's cache with a pool of the model's real shape."""
    import kv_world
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from leyline_server_ext.kernels import KVLayout, RopeSpec

    class Real(kv_world.World):
        def _make_pool(self) -> Any:
            common = {"device": "cpu", "enable_memory_saver": False}
            if self.kind == "mla":
                return MLATokenToKVPool(self.tokens, 1, torch.bfloat16, 512, 64, layer_num=27, **common)
            return MHATokenToKVPool(self.tokens, 1, torch.bfloat16, 3, 64, layer_num=30, **common)

        def _layout(self) -> KVLayout:
            rope = RopeSpec(1e4 ** -(torch.arange(32) / 32), 64, interleaved=self.kind == "mla")
            if self.kind == "mla":
                return KVLayout.mla(self.pool.kv_buffer, [rope] * 27, 512)
            return KVLayout.mha(self.pool.k_buffer, self.pool.v_buffer, [rope] * 30)

    made = Real(page=1, kind=kind, core="rust", tokens=tokens, dtype=torch.bfloat16)
    for plane in made._layout().planes:
        plane.buffer.normal_()  # a prefill would have written there: memory never touched is slow the first time
    return made


def admissions(name: str, kind: str) -> None:
    """A deletion of 800 tokens at 600, the rest moved: copied, and in place."""
    from leyline_server_ext import graft

    for keep in (True, False):
        for moved in (2_000, 5_000, 7_500):
            rest, kernel = [], []
            for _ in range(9):
                here = world(kind, 2 * moved + 4_000)
                spent = _timed_kernels(graft)
                total = _admission(here, moved, keep)
                kernel.append(1e3 * sum(spent))
                rest.append(1e3 * total - kernel[-1])
            how = "copied  " if keep else "in place"
            print(
                f"{name}: {moved:5,d} tokens {how} kernel {statistics.median(kernel):8.2f} ms, "
                f"rest {statistics.median(rest):6.2f} ms"
            )


def _timed_kernels(graft: Any) -> list[float]:
    from leyline_server_ext import kernels

    spent: list[float] = []

    def timed(kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            started = time.perf_counter()
            kernel(*args, **kwargs)
            spent.append(time.perf_counter() - started)

        return run

    graft.splice, graft.rotate_in_place = timed(kernels.splice), timed(kernels.rotate_in_place)
    return spent


def _admission(here: Any, moved: int, keep: bool) -> float:
    """Seconds that the admission of an edited prompt takes beyond the same match without an order."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from leyline_server_ext.diff import Hunk
    from leyline_server_ext.plan import make_plan
    from leyline_server_ext.views import Change, Mode, View, as_ids

    text = as_ids(np.random.default_rng(0).integers(0, 49_000, 1_400 + moved + 1))
    slots = here.allocator.alloc(len(text) - 1)
    here.cache.insert(InsertParams(key=RadixKey(array("q", text[:-1].tolist())), value=slots))
    target = np.r_[text[:600], text[1_400:], 1, 2, 3]
    plan = make_plan(
        View(text), (), target, [Change(Hunk(600, 1_400, 600, 600), Mode.AMORTIZE)], kept=len(text), release=not keep
    )
    sealed = here.sealer.seal_order(plan.order, None)
    extra = here.sealer.seal_lineage(plan.lineage, None, None)
    req = here.request(target.tolist(), extra_key=extra, custom={"leyline": sealed})
    key = RadixKey(array("q", target.tolist()), extra, limit=len(target) - 1)
    started = time.perf_counter()
    here.cache.match_prefix(MatchPrefixParams(key=key, req=req))
    spent = time.perf_counter() - started
    report = req.customized_info["leyline"][0]
    assert "reason" not in report
    assert report["grafted"] == moved
    plain = RadixKey(array("q", target.tolist()), extra, limit=len(target) - 1)
    started = time.perf_counter()
    here.cache.leyline_match(MatchPrefixParams(key=plain))
    return spent - (time.perf_counter() - started)


def main() -> None:
    """Print the table."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kv_world

        kv_world.prepare()
    keys()
    orders()
    for name, kind in SHAPES.items():
        admissions(name, kind)


if __name__ == "__main__":
    main()
