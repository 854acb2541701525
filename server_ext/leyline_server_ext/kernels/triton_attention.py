"""Segment attention on CUDA (AKV article, section 4): keys are turned in registers, nothing is written back.

One kernel for MLA (absorbed) and GQA, for decode (one query a request) and extend (a few). A program takes a block of
query rows (queries x heads that share a key head), one key head and one part of the target positions; it walks the
segments that touch its part, tile by tile. A tile lies in one segment, so its shift is a scalar and its cosines one
vector. Turned keys are rounded to the cache dtype: the scores are those of a materialised splice. Parts are merged by
a second, small kernel.
"""

# Arguments of a jit function have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .angles import turn_phases_on
from .attention_form import AttentionForm
from .segments import SegmentTable
from .triton_common import TL_DTYPES, cos_sin, dot, narrow, turn


@triton.jit
def _pairs(rows, keep, ROT_START: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """The two columns of every rotary pair, each ``(n, BLOCK)``, of the rows that start at the pointers ``rows``."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)
        mask = keep[:, None] & (column < 2 * HALF)[None, :]
        band = tl.load(rows[:, None] + (ROT_START + column)[None, :], mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(band, (rows.shape[0], BLOCK, 2)))
    else:
        column = tl.arange(0, BLOCK)
        mask = keep[:, None] & (column < HALF)[None, :]
        a = tl.load(rows[:, None] + (ROT_START + column)[None, :], mask=mask, other=0.0)
        b = tl.load(rows[:, None] + (ROT_START + HALF + column)[None, :], mask=mask, other=0.0)
    return a, b


@triton.jit(do_not_specialize=["queries", "row_blocks"])
def _segment_attention_kernel(
    out,  # (queries, heads, VALUE) cache dtype; (SPLITS, queries, heads, VALUE) float32 if SPLITS > 1
    lse,  # (SPLITS, queries, heads) float32, log2, if SPLITS > 1
    query,  # (queries, heads, WIDTH)
    key,  # (slots, kv_heads, WIDTH)
    value,  # (slots, kv_heads, VALUE), unused if VALUE_IS_REST
    phases,  # (HALF,) int64
    pages,
    first_page,
    skips,
    begins,
    ends,
    deltas,
    requests,  # the SegmentTable
    query_starts,  # (batch + 1,) int64
    scale,  # of the scores, times log2(e)
    queries,
    row_blocks,
    TYPE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROT_START: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    REST_START: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_IS_REST: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROTATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    request = tl.program_id(0) // row_blocks
    block = tl.program_id(0) % row_blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_query = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - first_query
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < count * GROUP
    if block * BLOCK_M >= count * GROUP:
        return
    head = kv_head * GROUP + row % GROUP
    at = (first_query + row // GROUP) * HEADS + head
    q = query + at * WIDTH
    pair = tl.arange(0, BLOCK_HALF)
    rest = tl.arange(0, BLOCK_REST)
    columns = tl.arange(0, BLOCK_VALUE)
    if HALF > 0:
        q_a, q_b = _pairs(q, live, ROT_START, HALF, INTERLEAVED, BLOCK_HALF)
        phase = tl.load(phases + pair, mask=pair < HALF, other=0)
    if REST > 0:
        q_mask = live[:, None] & (rest < REST)[None, :]
        q_rest = tl.load(q[:, None] + (REST_START + rest)[None, :], mask=q_mask, other=0.0)

    first_segment = tl.load(requests + request)
    last_segment = tl.load(requests + request + 1)
    length = tl.load(ends + last_segment - 1)
    visible = length - count + row // GROUP
    part = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    part_begin = split * part
    part_end = tl.minimum(part_begin + part, length)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_VALUE), tl.float32)
    for segment in range(first_segment, last_segment):
        begin = tl.load(begins + segment)
        low = tl.maximum(begin, part_begin)
        high = tl.minimum(tl.load(ends + segment), part_end)
        page_list = pages + tl.load(first_page + segment)
        offset = tl.load(skips + segment) - begin
        if HALF > 0:
            shift = tl.load(deltas + segment)
            if ROTATE:
                cos, sin = cos_sin(phase * shift)
        for start in range(low, high, BLOCK_N):
            position = start + tl.arange(0, BLOCK_N)
            keep = position < high
            inside = position + offset
            slot = tl.load(page_list + inside // PAGE, mask=keep, other=0) * PAGE + inside % PAGE
            rows = key + slot * KEY_STRIDE + kv_head * WIDTH
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if REST > 0:
                k_rest = tl.load(
                    rows[:, None] + (REST_START + rest)[None, :],
                    mask=keep[:, None] & (rest < REST)[None, :],
                    other=0.0,
                )
                scores = dot(q_rest, tl.trans(k_rest), scores, PRECISION)
            if HALF > 0:
                a, b = _pairs(rows, keep, ROT_START, HALF, INTERLEAVED, BLOCK_HALF)
                if ROTATE:
                    x, y = turn(a, b, cos[None, :], sin[None, :])
                    a, b = tl.where(shift == 0, a, narrow(x, TYPE)), tl.where(shift == 0, b, narrow(y, TYPE))
                scores = dot(q_a, tl.trans(a), scores, PRECISION)
                scores = dot(q_b, tl.trans(b), scores, PRECISION)
            seen = keep[None, :] & (position[None, :] <= visible[:, None])
            scores = tl.where(seen, scores * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - safe_top[:, None])
            shrink = tl.exp2(top - safe_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            if VALUE_IS_REST:
                v = k_rest
            else:
                v = tl.load(
                    value + slot[:, None] * VALUE_STRIDE + (kv_head * VALUE + columns)[None, :],
                    mask=keep[:, None] & (columns < VALUE)[None, :],
                    other=0.0,
                )
            acc = dot(narrow(weights, TYPE), v, acc, PRECISION)
            top = new_top

    seen_total = tl.where(total > 0, total, 1.0)
    acc = acc / seen_total[:, None]
    keep_out = live[:, None] & (columns < VALUE)[None, :]
    if SPLITS == 1:
        tl.store(out + at[:, None] * VALUE + columns[None, :], narrow(acc, TYPE), mask=keep_out)
    else:
        place = split.to(tl.int64) * queries * HEADS + at
        tl.store(out + place[:, None] * VALUE + columns[None, :], acc, mask=keep_out)
        tl.store(lse + place, top + tl.log2(seen_total), mask=live)


@triton.jit
def _merge_kernel(
    out,  # (rows, VALUE)
    parts,  # (SPLITS, rows, VALUE) float32, each normalised
    lse,  # (SPLITS, rows) float32, log2; -inf: nothing seen
    rows,
    TYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Softmax over the parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, BLOCK_VALUE)
    weight = tl.load(lse + split * rows + row, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    weight = weight / tl.sum(weight, 0)
    at = parts + (split[:, None] * rows + row) * VALUE + column[None, :]
    part = tl.load(at, mask=(split < SPLITS)[:, None] & (column < VALUE)[None, :], other=0.0)
    tl.store(out + row * VALUE + column, narrow(tl.sum(part * weight[:, None], 0), TYPE), mask=column < VALUE)


@dataclass(frozen=True)
class Tiles:
    """Launch shape: query rows and keys of a tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiles(form: AttentionForm, rows: int) -> Tiles:
    """For ``rows`` query rows (queries x heads of one key head) of a request: the largest that do not spill."""
    wide = max(form.rest, form.value_width) > 256
    if form.key.buffer.dtype == torch.float32:
        return Tiles(16, 16, 8, 2) if wide else Tiles(16, 32, 8, 1)
    if wide:
        return Tiles(16, 32, 8, 3) if rows <= 16 else Tiles(32, 32, 8, 1)
    if rows > 16:
        return Tiles(64, 64, 8, 3)
    return Tiles(16, 32 if form.key.buffer.shape[2] <= 64 else 64, 4, 3)


def constants(
    form: AttentionForm, heads: int, tile: Tiles, *, page: int, splits: int, rotate: bool
) -> dict[str, object]:
    """Compile-time arguments of the kernel; what ``make kernels-check`` compiles."""
    key, value = form.key.buffer, form.value.buffer
    return {
        "TYPE": TL_DTYPES[key.dtype],
        "KEY_STRIDE": key.stride(0),
        "VALUE_STRIDE": value.stride(0),
        "HEADS": heads,
        "GROUP": heads // key.shape[1],
        "WIDTH": key.shape[2],
        "ROT_START": form.key.rot_start,
        "HALF": form.half,
        "INTERLEAVED": bool(form.rope and form.rope.interleaved),
        "REST_START": form.rest_start,
        "REST": form.rest,
        "VALUE": form.value_width,
        "VALUE_IS_REST": form.value is form.key and form.rest == form.value_width,
        "PAGE": page,
        "SPLITS": splits,
        "ROTATE": rotate,
        "PRECISION": "ieee" if key.dtype == torch.float32 else "tf32",
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_HALF": _dot_width(form.half),
        "BLOCK_REST": _dot_width(form.rest),
        "BLOCK_VALUE": _dot_width(form.value_width),
    }


def segment_attention(
    form: AttentionForm,
    query: Tensor,
    table: SegmentTable,
    counts: Sequence[int],
    scale: float,
    *,
    splits: int | None = None,
    rotate: bool = True,
) -> Tensor:
    """Shapes as for the public function.

    Args:
        form: the layer's form.
        query: ``(queries, heads, width)``.
        table: what each request attends to.
        counts: queries of each request.
        scale: factor of the scores.
        splits: parts of the sequence; None chooses by the size of the card.
        rotate: False leaves the keys as stored whatever the table says: the baseline of the benchmark.
    """
    key = form.key.buffer
    queries, heads, _ = query.shape
    kv_heads = key.shape[1]
    tile = tiles(form, max(counts) * heads // kv_heads)
    row_blocks = triton.cdiv(max(counts) * heads // kv_heads, tile.rows)
    blocks = len(counts) * row_blocks * kv_heads
    parts = _splits(blocks, max(table.lengths), key.device) if splits is None else splits
    starts = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(key.device, non_blocking=True)
    phases = turn_phases_on(form.rope, key.device) if form.rope else starts
    out = query.new_empty(queries, heads, form.value_width)
    partial = out if parts == 1 else out.new_empty((parts, *out.shape), dtype=torch.float32)
    lse = query.new_empty((parts, queries, heads), dtype=torch.float32)
    values = constants(form, heads, tile, page=table.page_size, splits=parts, rotate=rotate)
    _segment_attention_kernel[(len(counts) * row_blocks, kv_heads, parts)](
        partial,
        lse,
        query,
        key,
        form.value.buffer,
        phases,
        table.pages,
        table.first_page,
        table.skip,
        table.begin,
        table.end,
        table.delta,
        table.requests,
        starts,
        scale * 1.4426950408889634,
        queries,
        row_blocks,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **values,
    )
    if parts > 1:
        _merge_kernel[(queries * heads,)](
            out, partial, lse, queries * heads, **merge_constants(form, parts), num_warps=4
        )
    return out


def merge_constants(form: AttentionForm, splits: int) -> dict[str, object]:
    """Compile-time arguments of the merge."""
    return {
        "TYPE": TL_DTYPES[form.key.buffer.dtype],
        "SPLITS": splits,
        "VALUE": form.value_width,
        "BLOCK_SPLITS": triton.next_power_of_2(splits),
        "BLOCK_VALUE": triton.next_power_of_2(form.value_width),
    }


def _splits(blocks: int, longest: int, device: torch.device) -> int:
    """Parts (a power of two, so few kernels get compiled) that give every multiprocessor about two programs."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = triton.cdiv(2 * cores, blocks)
    return triton.next_power_of_2(max(1, min(wanted, triton.cdiv(longest, 256), 64)))


def _dot_width(width: int) -> int:
    """Columns of an operand of tl.dot: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(width))
