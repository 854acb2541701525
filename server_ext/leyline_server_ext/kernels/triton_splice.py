"""Splice and in-place rotation on CUDA: one launch over all planes of a pool.

One program moves ``BLOCK_ROWS`` rows of one plane. Rows are contiguous ``(heads, width)``, so the copied columns go as
16-byte vectors; the rotary columns are turned in registers between their load and their store. Programs along grid
axis 0 walk the rows of one plane, axis 1 the planes; the base addresses come from a device tensor. See docs/kernels.md
for the byte counts and the floor.
"""

# Arguments of a jit function have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_plan import PlaneGroup, addresses, plane_groups
from .layout import KVLayout
from .triton_common import TL_DTYPES, cos_sin, narrow, plane_pointer, turn

NUM_WARPS = 4


@triton.jit
def _copy_columns(src, dst, mask, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Copy columns [FIRST, END) of the rows that start at the pointers ``src`` / ``dst`` ``(..., 1)``."""
    for start in tl.static_range(FIRST, END, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        keep = mask & (columns < END)
        tl.store(dst + columns, tl.load(src + columns, mask=keep), mask=keep)


@triton.jit(do_not_specialize=["delta", "rows"])
def _splice_kernel(
    src_planes,  # (planes,) int64 addresses
    dst_planes,  # (planes,) int64 addresses
    plane_ropes,  # (planes,) int32, -1: copy
    phases,  # (ropes, HALF) int64, 2**-64 turns per position
    src_slots,  # (rows,) int64
    dst_slots,  # (rows,) int64
    deltas,  # (rows,) int64 if PER_ROW
    delta,  # int64 otherwise
    rows,
    TYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    SRC_STRIDE: tl.constexpr,
    DST_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROT_START: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PER_ROW: tl.constexpr,
    BAND_ONLY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_COPY: tl.constexpr,
):
    plane = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    src = plane_pointer(src_planes, plane, TYPE, ALIGN) + tl.load(src_slots + row, mask=live, other=0) * SRC_STRIDE
    dst = plane_pointer(dst_planes, plane, TYPE, ALIGN) + tl.load(dst_slots + row, mask=live, other=0) * DST_STRIDE
    rope = tl.load(plane_ropes + plane)
    if rope < 0:
        if not BAND_ONLY:
            _copy_columns(src[:, None], dst[:, None], live[:, None], 0, HEADS * WIDTH, BLOCK_COPY)
    else:
        pair = tl.arange(0, BLOCK_HALF)
        phase = tl.load(phases + rope * HALF + pair, mask=pair < HALF, other=0)
        if PER_ROW:
            shift = tl.load(deltas + row, mask=live, other=0)
            cos, sin = cos_sin(shift[:, None] * phase[None, :])
            cos, sin = cos[:, None, :], sin[:, None, :]
            still = (shift == 0)[:, None, None]
        else:
            cos, sin = cos_sin(phase * delta.to(tl.int64))
            cos, sin = cos[None, None, :], sin[None, None, :]
        for first in tl.static_range(0, HEADS, BLOCK_HEADS):
            head = first + tl.arange(0, BLOCK_HEADS)
            here = live[:, None, None] & (head < HEADS)[None, :, None]
            from_head = src[:, None, None] + (head * WIDTH)[None, :, None]
            to_head = dst[:, None, None] + (head * WIDTH)[None, :, None]
            if not BAND_ONLY:
                _copy_columns(from_head, to_head, here, 0, ROT_START, BLOCK_REST)
                _copy_columns(from_head, to_head, here, ROT_START + 2 * HALF, WIDTH, BLOCK_REST)
            if INTERLEAVED:
                column = (ROT_START + tl.arange(0, 2 * BLOCK_HALF))[None, None, :]
                keep = here & (column < ROT_START + 2 * HALF)
                band = tl.load(from_head + column, mask=keep)
                a, b = tl.split(tl.reshape(band, (BLOCK_ROWS, BLOCK_HEADS, BLOCK_HALF, 2)))
                x, y = turn(a, b, cos, sin)
                turned = tl.reshape(
                    tl.join(narrow(x, TYPE), narrow(y, TYPE)), (BLOCK_ROWS, BLOCK_HEADS, 2 * BLOCK_HALF)
                )
                if PER_ROW:
                    turned = tl.where(still, band, turned)
                tl.store(to_head + column, turned, mask=keep)
            else:
                column = (ROT_START + pair)[None, None, :]
                keep = here & (pair < HALF)[None, None, :]
                a = tl.load(from_head + column, mask=keep)
                b = tl.load(from_head + column + HALF, mask=keep)
                x, y = turn(a, b, cos, sin)
                x, y = narrow(x, TYPE), narrow(y, TYPE)
                if PER_ROW:
                    x, y = tl.where(still, a, x), tl.where(still, b, y)
                tl.store(to_head + column, x, mask=keep)
                tl.store(to_head + column + HALF, y, mask=keep)


def constants(group: PlaneGroup, *, band_only: bool, per_row: bool, dst_stride: int | None = None) -> dict[str, object]:
    """Compile-time arguments of the kernel for a group of planes; what ``make kernels-check`` compiles."""
    block = group.blocks(band_only=band_only)
    return {
        "TYPE": TL_DTYPES[group.dtype],
        "ALIGN": group.align,
        "SRC_STRIDE": group.stride,
        "DST_STRIDE": group.stride if dst_stride is None else dst_stride,
        "HEADS": group.heads,
        "WIDTH": group.width,
        "ROT_START": group.rot_start,
        "HALF": group.half,
        "INTERLEAVED": group.interleaved,
        "PER_ROW": per_row,
        "BAND_ONLY": band_only,
        "BLOCK_ROWS": block.rows,
        "BLOCK_HEADS": block.heads,
        "BLOCK_HALF": block.half,
        "BLOCK_REST": block.rest,
        "BLOCK_COPY": block.copy,
    }


def splice(layout: KVLayout, src: Tensor, dst: Tensor, delta: Tensor | int, *, staged: bool) -> None:
    """``row dst[i] := row src[i] turned by delta[i]`` in every plane; arguments as for :mod:`cpu_splice`."""
    for group in plane_groups(layout):
        if staged:
            _splice_staged(group, src, dst, delta)
        else:
            _launch(group, group.planes, group.planes, src, dst, delta)


def rotate_in_place(layout: KVLayout, slots: Tensor, delta: Tensor | int) -> None:
    """Turn the rotary columns of ``slots``, touching no other byte."""
    if isinstance(delta, int) and delta == 0:
        return
    for group in plane_groups(layout):
        turning = group.turning()
        if turning is not None:
            _launch(turning, turning.planes, turning.planes, slots, slots, delta, band_only=True)


def prepare(layout: KVLayout) -> None:
    """Compile every variant of the kernel that this pool needs. Slot 0 is written with what it holds."""
    slot = torch.zeros(1, dtype=torch.int64, device=layout.device)
    for group in plane_groups(layout):
        turning = group.turning()
        for delta in (0, slot):  # shifts of zero: the variants for one shift and for a shift per row
            _launch(group, group.planes, group.planes, slot, slot, delta)
            if turning is not None:
                _launch(turning, turning.planes, turning.planes, slot, slot, delta, band_only=True)


def _splice_staged(group: PlaneGroup, src: Tensor, dst: Tensor, delta: Tensor | int) -> None:
    """Through a buffer of one plane's rows, so that every row is read before any is written."""
    shape = (src.numel(), group.heads, group.width)
    stage = torch.empty(shape, dtype=group.dtype, device=src.device)
    here = torch.arange(src.numel(), device=src.device)
    there = addresses([stage])
    for index in range(group.planes.numel()):
        one = group.only(index)
        _launch(one, one.planes, there, src, here, delta, dst_stride=stage.stride(0))
        _launch(one.with_stride(stage.stride(0)), there, one.planes, here, dst, 0, dst_stride=group.stride)


def _launch(
    group: PlaneGroup,
    src_planes: Tensor,
    dst_planes: Tensor,
    src: Tensor,
    dst: Tensor,
    delta: Tensor | int,
    *,
    band_only: bool = False,
    dst_stride: int | None = None,
) -> None:
    per_row = isinstance(delta, Tensor)
    shifts = delta.to(src.device, non_blocking=True) if isinstance(delta, Tensor) else src
    whole = 0 if isinstance(delta, Tensor) else delta
    ropes = group.ropes if per_row or whole else torch.full_like(group.ropes, -1)
    values = constants(group, band_only=band_only, per_row=per_row, dst_stride=dst_stride)
    grid = (triton.cdiv(src.numel(), group.blocks(band_only=band_only).rows), group.planes.numel())
    _splice_kernel[grid](
        src_planes,
        dst_planes,
        ropes,
        group.phases,
        src,
        dst,
        shifts,
        whole,
        src.numel(),
        num_warps=NUM_WARPS,
        **values,
    )
