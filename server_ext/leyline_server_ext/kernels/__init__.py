"""The kernels and the one door to them: Triton on CUDA pools, numba and torch on CPU pools.

``splice`` copies KV rows to other slots and turns their keys to another position; ``rotate_in_place`` turns them where
they are; ``segment_attention`` turns them in registers while attending and writes nothing. Importing this package
imports torch; Triton or numba only when a pool is used that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import _checks
from .attention_form import AttentionForm, check_query
from .layout import KVLayout, RopeSpec
from .segments import Segment, SegmentTable

__all__ = [
    "KVLayout",
    "RopeSpec",
    "Segment",
    "SegmentTable",
    "prepare",
    "rotate_in_place",
    "segment_attention",
    "splice",
]


def splice(layout: KVLayout, src: Tensor, dst: Tensor, delta: Tensor | int, *, disjoint: bool = False) -> None:
    """Copy KV rows to other slots with their keys turned: row ``dst[i]`` := row ``src[i]``, K moved by ``delta[i]``.

    Over all layers. Only the rotary part of K changes, with float32 math, stored in the cache dtype; every other
    byte, and whole rows whose delta is 0, are copied bit for bit. Slots not named in ``dst`` are untouched. A slot may
    be both source and destination: all rows are then read before any is written.

    Args:
        layout: the pool; **its buffers are changed**.
        src: ``(n,)`` int64 slots to read.
        dst: ``(n,)`` int64 slots to write, all different.
        delta: positions to move by, one int for all rows or ``(n,)`` int64 (any device).
        disjoint: the caller vouches that no source slot is a destination and no destination occurs twice. On CUDA
            finding that out would make the host wait for the device; on the CPU the check is cheap.

    Raises:
        ValueError: shapes, dtypes, devices or (on the CPU) slots out of range, or a destination named twice.
        TypeError: delta is neither an int nor a tensor.
    """
    _checks.check_slots(layout, "src", src)
    _checks.check_slots(layout, "dst", dst)
    if src.shape != dst.shape:
        raise ValueError(f"{src.numel()} source slots but {dst.numel()} destinations")
    _checks.check_delta(delta, src.numel())
    if not src.numel():
        return
    staged = False
    if not disjoint:
        _checks.check_distinct("dst", dst, layout.slots)
        staged = _checks.reads_what_it_writes(src, dst, layout.slots)
    _splices(layout).splice(layout, src, dst, delta, staged=staged)


def rotate_in_place(layout: KVLayout, slots: Tensor, delta: Tensor | int, *, distinct: bool = False) -> None:
    """Turn the keys of ``slots`` by ``delta`` where they lie, touching nothing but the rotary columns.

    Args:
        layout: the pool; **its buffers are changed**.
        slots: ``(n,)`` int64, all different.
        delta: positions to move by, one int for all rows or ``(n,)`` int64 (any device). Rows with 0 keep every bit.
        distinct: the caller vouches that no slot occurs twice (see ``disjoint`` of :func:`splice`).

    Raises:
        ValueError: shapes, dtypes, devices or (on the CPU) slots out of range, or a slot named twice.
        TypeError: delta is neither an int nor a tensor.
    """
    _checks.check_slots(layout, "slots", slots)
    _checks.check_delta(delta, slots.numel())
    if not slots.numel():
        return
    if not distinct:
        _checks.check_distinct("slots", slots, layout.slots)
    _splices(layout).rotate_in_place(layout, slots, delta)


def segment_attention(
    layout: KVLayout,
    layer: int,
    query: Tensor,
    table: SegmentTable,
    *,
    scale: float,
    query_counts: Sequence[int] | None = None,
) -> Tensor:
    """Attend through a segment table, keys turned on the fly: what a splice followed by attention gives, copy-free.

    The pool is only read. The queries of a request stand at its last target positions and see all positions up to
    their own (AKV article, section 4), so their own K and V must already be in the pool and in the table.

    Args:
        layout: the pool.
        layer: index of the layer.
        query: ``(queries, heads, width)`` in the cache dtype, contiguous, already rotated to target positions;
            requests one after the other. MLA: absorbed, ``width = kv_lora_rank + qk_rope_head_dim``. GQA: width is the
            head size and ``heads`` a multiple of the key heads.
        table: what each request attends to.
        scale: factor of the scores, such as ``head_dim ** -0.5``.
        query_counts: queries of each request; None for one each (decode).

    Returns:
        ``(queries, heads, value_width)``; MLA: ``kv_lora_rank`` wide, still to be multiplied by the value projection.

    Raises:
        ValueError: no such layer, or query, table and pool do not fit together.
    """
    form = AttentionForm.of(layout, layer)
    counts = [1] * len(table.lengths) if query_counts is None else list(query_counts)
    check_query(form, query, table, counts)
    if not counts:
        return query.new_empty(0, query.shape[1], form.value_width)
    if _use_triton(layout):
        from . import triton_attention

        return triton_attention.segment_attention(form, query, table, counts, scale)
    from . import torch_attention

    return torch_attention.segment_attention(form, query, table, counts, scale)


def prepare(layout: KVLayout) -> None:
    """Compile what `splice` and `rotate_in_place` need for this pool, or load what was compiled earlier.

    Without it the first splice does, and everything waits for it. The pool keeps every bit.

    Args:
        layout: a pool that nothing else writes to at the same time.

    Raises:
        Exception: whatever the compiler says, such as that there is no C compiler (Triton needs one).
    """
    _splices(layout).prepare(layout)


def _splices(layout: KVLayout) -> Any:
    """The module that moves this pool's rows."""
    if _use_triton(layout):
        from . import triton_splice

        return triton_splice
    from . import cpu_splice

    return cpu_splice


def _use_triton(layout: KVLayout) -> bool:
    """CUDA pools, and CPU pools under Triton's interpreter: so whatever uses this door can be tested on the kernels."""
    return layout.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
