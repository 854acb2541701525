"""Kernels on a CUDA card: right first, then how fast against copies measured in the same run.

    python -m leyline_evals.bench_gpu [--out out/bench_gpu.json] [--quick]

Needs torch, triton and a CUDA device, nothing else; a few minutes. Prints a table and writes JSON; exit status 1 if a
kernel is wrong (a missed goal is reported, not an error), 2 without a CUDA device.

Bandwidth counts every byte once read and once written, for the kernel and for the device-to-device copy it is held
against. Goals: splice at least 85 % of the copy's from 8,192 tokens up, rotate_in_place at least 80 % (of the bytes it
touches), segment attention at most 5 % slower than the same kernel without rotation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from leyline_server_ext.kernels import (
    KVLayout,
    RopeSpec,
    Segment,
    SegmentTable,
    reference,
    rotate_in_place,
    segment_attention,
    splice,
)
from leyline_server_ext.kernels.attention_form import AttentionForm

MOVED = (1024, 4096, 8192, 16384, 65536)
ATTENDED = (4096, 16384, 65536)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GOALS = {"splice": 0.85, "rotate_in_place": 0.80, "segment_attention": 1.05}
FROM_TOKENS = 8192


@dataclass(frozen=True)
class Row:
    """One measurement: median milliseconds of the kernel and of what it is held against, and their ratio.

    ``ratio`` is a share of the copy's bandwidth, or for segment attention the slowdown against ``baseline``.
    """

    kernel: str
    pool: str
    tokens: int
    milliseconds: float
    baseline: str
    baseline_milliseconds: float
    gigabytes_per_second: float
    ratio: float
    goal_met: bool | None


def rope(rotary_dim: int, interleaved: bool) -> RopeSpec:
    """Base 10,000."""
    half = rotary_dim // 2
    return RopeSpec(10000.0 ** -(torch.arange(half, dtype=torch.float64) / half), rotary_dim, interleaved)


def deepseek(slots: int, dtype: torch.dtype, device: str, layers: int = 27) -> KVLayout:
    """DeepSeek-V2-Lite: 27 layers of 512 + 64."""
    buffers = [torch.randn(slots, 1, 576, device=device).to(dtype) for _ in range(layers)]
    return KVLayout.mla(buffers, [rope(64, True)] * layers, 512)


def llama(slots: int, dtype: torch.dtype, device: str, layers: int = 32) -> KVLayout:
    """Llama-3-8B: 32 layers of 8 key heads of 128."""
    k = [torch.randn(slots, 8, 128, device=device).to(dtype) for _ in range(layers)]
    v = [torch.randn(slots, 8, 128, device=device).to(dtype) for _ in range(layers)]
    return KVLayout.mha(k, v, [rope(128, False)] * layers)


POOLS: dict[str, Callable[..., KVLayout]] = {"deepseek-v2-lite": deepseek, "llama-3-8b": llama}
QUERY_HEADS = {"deepseek-v2-lite": 16, "llama-3-8b": 32}


def check(device: str, rows: int = 777) -> list[str]:
    """Every kernel, pool and dtype against float64; what is wrong, as text."""
    wrong = []
    for name, make in POOLS.items():
        for dtype in DTYPES:
            layout = make(2 * rows + 5, dtype, device, 2)
            order = torch.randperm(layout.slots, device=device)
            src, dst = order[:rows], order[rows : 2 * rows]
            delta = (torch.arange(rows, device=device) * 4 // rows) * 30000 - 60000
            for what, shift in (("one shift", -813), ("segments", delta)):
                full = torch.full_like(src, shift) if isinstance(shift, int) else shift
                want = reference.splice(layout, src, dst, full)
                splice(layout, src, dst, shift)
                wrong += _compare(f"splice {name} {dtype} {what}", layout, want)
                want = reference.splice(layout, src, src, full)
                rotate_in_place(layout, src, shift)
                wrong += _compare(f"rotate_in_place {name} {dtype} {what}", layout, want)
            want = reference.splice(layout, src, src.roll(1), delta)
            splice(layout, src, src.roll(1), delta)
            wrong += _compare(f"overlapping splice {name} {dtype}", layout, want)
            wrong += _check_attention(name, layout)
    return wrong


def _compare(what: str, layout: KVLayout, want: list[Tensor]) -> list[str]:
    """Float32 math and one rounding: at most one unit in the last place, plus four float32 roundings near zero."""
    unit = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 0.0}[layout.planes[0].buffer.dtype]
    for plane, expected in zip(layout.planes, want, strict=True):
        if not torch.allclose(plane.buffer.double(), expected.double(), rtol=unit, atol=4e-6):
            error = (plane.buffer.double() - expected.double()).abs().max()
            return [f"{what}: off by {float(error):.2e}"]
    return []


def _check_attention(name: str, layout: KVLayout) -> list[str]:
    heads, dtype = QUERY_HEADS[name], layout.planes[0].buffer.dtype
    width, wrong = layout.planes[0].buffer.shape[2], []
    order = torch.randperm(layout.slots)
    first = [Segment(order[:300], 300, 0), Segment(order[400:1100], 700, -100)]
    table = SegmentTable.build([first, [Segment(order[:70], 70, 9)]], device=layout.device)
    for counts in ([1, 1], [6, 3]):
        query = torch.randn(sum(counts), heads, width, device=layout.device).to(dtype)
        scale = width**-0.5
        want = reference.segment_attention(layout, 0, query, table, counts, scale)
        rounding = reference.segment_attention(
            layout, 0, query, table, counts, scale, torch.float32, rounded_weights=True
        ).to(dtype)
        got = segment_attention(layout, 0, query, table, scale=scale, query_counts=counts)
        allowed = max(2 * float((rounding - want).abs().max()), 2e-6)
        error = float((got - want).abs().max())
        if not error <= allowed:
            wrong.append(f"segment_attention {name} {dtype} {counts}: off by {error:.2e}, {allowed:.2e} allowed")
    return wrong


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median of ``repeats`` runs, each between CUDA events, after three runs to warm up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def _copy_milliseconds(count: int, repeats: int) -> float:
    """A device-to-device copy of ``count`` bytes."""
    source = torch.empty(count, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source), repeats)


def moves(pool: str, repeats: int, moved: tuple[int, ...]) -> list[Row]:
    """Splice (scattered slots, one shift and eight) and rotate_in_place against copies of as many bytes."""
    rows = []
    layout = POOLS[pool](2 * max(moved), torch.bfloat16, "cuda")
    for tokens in moved:
        order = torch.randperm(layout.slots, device="cuda")
        src, dst = order[:tokens].sort().values, order[tokens : 2 * tokens].sort().values
        eight = (torch.arange(tokens, device="cuda") * 8 // tokens) * 100 + 1
        whole, band = tokens * layout.bytes_per_token, tokens * layout.rotary_bytes_per_token
        copy, copy_band = _copy_milliseconds(whole, repeats), _copy_milliseconds(band, repeats)
        for label, delta in (("one shift", -800), ("eight shifts", eight)):
            took = milliseconds(partial(splice, layout, src, dst, delta, disjoint=True), repeats)
            rows.append(_move("splice", f"{pool}, {label}", tokens, took, copy, whole))
            took = milliseconds(partial(rotate_in_place, layout, src, delta, distinct=True), repeats)
            rows.append(_move("rotate_in_place", f"{pool}, {label}", tokens, took, copy_band, band))
    return rows


def _move(kernel: str, pool: str, tokens: int, took: float, copy: float, count: int) -> Row:
    ratio = copy / took
    met = ratio >= GOALS[kernel] if tokens >= FROM_TOKENS else None
    return Row(kernel, pool, tokens, took, "copy", copy, 2 * count / took / 1e6, ratio, met)


def attention(pool: str, repeats: int, attended: tuple[int, ...]) -> list[Row]:
    """Decode over eight segments against the same kernel without rotation, and against splice + that kernel."""
    from leyline_server_ext.kernels import triton_attention

    rows = []
    layout = POOLS[pool](2 * max(attended), torch.bfloat16, "cuda", 1)
    form = AttentionForm.of(layout, 0)
    width, scale = form.key.buffer.shape[2], form.key.buffer.shape[2] ** -0.5
    for tokens in attended:
        order = torch.randperm(layout.slots)[: 2 * tokens]
        src, dst = order[:tokens].sort().values, order[tokens:].sort().values
        pieces = src.split(tokens // 8)
        table = SegmentTable.build([[Segment(p, len(p), -100 * i) for i, p in enumerate(pieces)]], device="cuda")
        flat = SegmentTable.build([[Segment(dst, tokens, 0)]], device="cuda")
        delta = torch.cat([torch.full((len(p),), -100 * i) for i, p in enumerate(pieces)]).cuda()
        query = torch.randn(1, QUERY_HEADS[pool], width, device="cuda").bfloat16()
        attend = partial(triton_attention.segment_attention, form, query, counts=[1], scale=scale)
        plain, moved = partial(attend, table=table, rotate=False), partial(attend, table=flat, rotate=False)
        materialise = partial(_both, partial(splice, layout, src.cuda(), dst.cuda(), delta, disjoint=True), moved)
        took = milliseconds(partial(attend, table=table), repeats)
        read = tokens * layout.bytes_per_token / took / 1e6
        for label, base in (
            ("without rotation", milliseconds(plain, repeats)),
            ("splice + attention", milliseconds(materialise, repeats)),
        ):
            met = took / base <= GOALS["segment_attention"] if label == "without rotation" else None
            rows.append(Row("segment_attention", pool, tokens, took, label, base, read, took / base, met))
    return rows


def _both(first: Callable[[], object], second: Callable[[], object]) -> None:
    first()
    second()


def table_text(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'kernel':<18}{'pool':<32}{'tokens':>7}{'ms':>9}{'GB/s':>7}  {'against':<20}{'ms':>9}{'ratio':>7}  goal"]
    for r in rows:
        goal = {True: "met", False: "MISSED", None: ""}[r.goal_met]
        lines.append(
            f"{r.kernel:<18}{r.pool:<32}{r.tokens:>7}{r.milliseconds:>9.4f}{r.gigabytes_per_second:>7.0f}  "
            f"{r.baseline:<20}{r.baseline_milliseconds:>9.4f}{r.ratio:>7.2f}  {goal}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_gpu.json"))
    parser.add_argument("--quick", action="store_true", help="few sizes and repeats")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_gpu: no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    wrong = check("cuda")
    print("\n".join(wrong) or "all kernels agree with float64")
    repeats, sizes, lengths = (10, MOVED[:3], ATTENDED[:1]) if args.quick else (30, MOVED, ATTENDED)
    rows: list[Row] = []
    for pool in POOLS if not wrong else ():
        rows += moves(pool, repeats, sizes)
        torch.cuda.empty_cache()
        rows += attention(pool, repeats, lengths)
        torch.cuda.empty_cache()
    print(table_text(rows))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    card = {"name": torch.cuda.get_device_name(), "torch": torch.__version__}
    result = {"card": card, "wrong": wrong, "rows": [asdict(row) for row in rows]}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
