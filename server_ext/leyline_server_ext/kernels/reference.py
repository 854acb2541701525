"""Slow, obvious forms of every kernel: what the fast ones are compared with.

The rotation is RoPE's group property (AKV article, section 2): K at position m turned by delta is K at m + delta,
``R(delta) R(m) = R(m + delta)``, with ``R(a)`` turning the pair (x, y) to
``(x cos a - y sin a, y cos a + x sin a)`` and ``a = delta * inv_freq``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_form import AttentionForm
from .layout import KVLayout, RopeSpec
from .segments import SegmentTable


def rotate(x: Tensor, delta: Tensor, rope: RopeSpec, math_dtype: torch.dtype = torch.float64) -> Tensor:
    """Turn rotary columns.

    Args:
        x: ``(rows, heads, rotary_dim)``, any floating dtype.
        delta: ``(rows,)`` int64, positions to move each row by.
        rope: pairing and frequencies.
        math_dtype: dtype of the two products and their sum. Angles are always float64.

    Returns:
        The same shape in ``math_dtype``, not rounded back.
    """
    angle = delta.double()[:, None, None] * rope.inv_freq.double().to(x.device)
    cos, sin = angle.cos().to(math_dtype), angle.sin().to(math_dtype)
    wide = x.to(math_dtype)
    half = rope.rotary_dim // 2
    out = torch.empty_like(wide)
    if rope.interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        out[..., 0::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = wide[..., :half], wide[..., half:]
        out[..., :half], out[..., half:] = a * cos - b * sin, b * cos + a * sin
    return out


def splice(
    layout: KVLayout, src: Tensor, dst: Tensor, delta: Tensor, math_dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """What every plane must be after :func:`leyline_server_ext.kernels.splice`; changes nothing.

    Args:
        layout: the pool as it is before.
        src: ``(n,)`` int64 slots read.
        dst: ``(n,)`` int64 slots written, all different.
        delta: ``(n,)`` int64.
        math_dtype: see :func:`rotate`.

    Returns:
        One new tensor per plane, in the cache dtype.
    """
    after = []
    for plane in layout.planes:
        rows = plane.buffer[src]
        if plane.rope_index >= 0:
            rope = layout.ropes[plane.rope_index]
            band = slice(plane.rot_start, plane.rot_start + rope.rotary_dim)
            turned = rotate(rows[..., band], delta, rope, math_dtype).to(rows.dtype)
            moved = (delta != 0)[:, None, None]
            rows[..., band] = torch.where(moved, turned, rows[..., band])
        new = plane.buffer.clone()
        new[dst] = rows
        after.append(new)
    return after


def segment_attention(
    layout: KVLayout,
    layer: int,
    query: Tensor,
    table: SegmentTable,
    counts: list[int],
    scale: float,
    math_dtype: torch.dtype = torch.float64,
    *,
    rounded_weights: bool = False,
) -> Tensor:
    """Materialised splice, then ordinary attention, one query and one head at a time (AKV article, section 4).

    Args:
        layout: the pool, only read.
        layer: which layer.
        query: ``(queries, heads, width)``.
        table: what each request attends to.
        counts: queries of each request, at its last target positions.
        scale: factor of the scores.
        math_dtype: dtype of everything but the turned keys, which are rounded to the cache dtype as a splice does.
        rounded_weights: round the softmax numerators to the cache dtype before they meet V, as tensor cores need it;
            the error this makes is the tolerance of the tests.

    Returns:
        ``(queries, heads, value_width)`` in ``math_dtype``.
    """
    form = AttentionForm.of(layout, layer)
    rows = []
    spans = zip(table.lengths, counts, strict=True)
    where = [(request, n - m + i) for request, (n, m) in enumerate(spans) for i in range(m)]
    for index, (request, position) in enumerate(where):
        key, value = _materialise(form, table, request, math_dtype)
        group = query.shape[1] // key.shape[1]
        heads = []
        for head in range(query.shape[1]):
            k, v = key[: position + 1, head // group], value[: position + 1, head // group].to(math_dtype)
            scores = k.to(math_dtype) @ query[index, head].to(math_dtype) * scale
            weights = (scores - scores.max()).exp()
            seen = weights.to(query.dtype).to(math_dtype) if rounded_weights else weights
            heads.append(seen @ v / weights.sum())
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def _materialise(
    form: AttentionForm, table: SegmentTable, request: int, math_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    keys, values = [], []
    for slots, delta in table.segments(request):
        key = form.key.buffer[slots]
        if form.rope is not None and delta:
            band = slice(form.key.rot_start, form.key.rot_start + form.rope.rotary_dim)
            shift = torch.full_like(slots, delta)
            key[..., band] = rotate(key[..., band], shift, form.rope, math_dtype).to(key.dtype)
        keys.append(key)
        values.append(form.value.buffer[slots][..., : form.value_width])
    return torch.cat(keys), torch.cat(values)
