"""Segment attention in vectorised torch: the path of CPU pools.

Keys are turned in a temporary; the pool is only read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .angles import cos_sin, turn_phases_on
from .attention_form import AttentionForm
from .layout import RopeSpec
from .segments import SegmentTable


def segment_attention(
    form: AttentionForm, query: Tensor, table: SegmentTable, counts: Sequence[int], scale: float
) -> Tensor:
    """Shapes as for the public function; scores, softmax and sums in float32."""
    out = query.new_empty(query.shape[0], query.shape[1], form.value_width)
    first = 0
    for request, count in enumerate(counts):
        key, value = _gather(form, table, request)
        out[first : first + count] = _attend(query[first : first + count], key, value, scale)
        first += count
    return out


def _gather(form: AttentionForm, table: SegmentTable, request: int) -> tuple[Tensor, Tensor]:
    """Turned keys ``(n, kv_heads, width)`` in the cache dtype and values ``(n, kv_heads, value_width)``."""
    keys, values = [], []
    for slots, delta in table.segments(request):
        key = form.key.buffer.index_select(0, slots)
        if form.rope is not None and delta:
            start = form.key.rot_start
            _turn(key[..., start : start + form.rope.rotary_dim], form.rope, delta)
        keys.append(key)
        if form.value is form.key:
            values.append(key[..., : form.value_width])
        else:
            values.append(form.value.buffer.index_select(0, slots))
    return torch.cat(keys), torch.cat(values)


def _turn(band: Tensor, rope: RopeSpec, delta: int) -> None:
    """Turn ``band`` ``(n, heads, rotary_dim)`` where it is."""
    cos, sin = cos_sin(turn_phases_on(rope, band.device), torch.tensor(delta))
    wide, half = band.float(), rope.rotary_dim // 2
    if rope.interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        band.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2))
    else:
        a, b = wide[..., :half], wide[..., half:]
        band.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``(m, heads, width)`` queries at the last ``m`` positions of ``n`` keys -> ``(m, heads, value_width)``."""
    m, heads, _ = query.shape
    n, kv_heads, _ = key.shape
    grouped = query.float().unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3)
    scores = grouped @ key.float().permute(1, 2, 0).unsqueeze(1) * scale
    if m > 1:
        hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
        scores.masked_fill_(hidden, float("-inf"))
    out = scores.softmax(-1) @ value.float().permute(1, 0, 2).unsqueeze(1)
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
