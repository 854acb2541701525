"""The splice and the in-place rotation in vectorised torch: the path of CPU pools.

Rows are put in order of their shift, so that each chunk has one shift and one cosine vector (a splice has as many
shifts as it has segments). A chunk is small enough that its temporaries stay in the second-level cache, large enough
that a torch call costs little beside it. Copies go through the widest element that divides a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .angles import cos_sin
from .layout import KVLayout, Plane, RopeSpec

CHUNK_BYTES = 512 * 1024
# With more distinct shifts than this per chunk of rows, one cosine row per token beats one chunk per shift.
_MIN_ROWS_PER_SHIFT = 32

CosSin = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Rows:
    """Rows of one chunk: ``shift`` indexes the table of distinct shifts (an int for all, or one per row)."""

    src: Tensor
    dst: Tensor
    shift: int | Tensor


class _Plan:
    """Rows in order of their shift; rows that do not turn come first, as ``still``."""

    def __init__(self, src: Tensor, dst: Tensor, delta: Tensor | int) -> None:
        if isinstance(delta, int):
            self.shifts = torch.tensor([delta])
            self.bounds = [0, src.numel()]
            self.src, self.dst, self.inverse = src, dst, None
            return
        shifts, inverse, counts = torch.unique(delta, return_inverse=True, return_counts=True)
        order = torch.argsort(inverse, stable=True)
        self.shifts = shifts
        self.src, self.dst, self.inverse = src[order], dst[order], inverse[order]
        self.bounds = [0, *counts.cumsum(0).tolist()]

    def chunks(self, size: int) -> Iterator[_Rows]:
        """Every row once, at most ``size`` at a time."""
        inverse = self.inverse
        per_row = inverse is not None and self.src.numel() < _MIN_ROWS_PER_SHIFT * len(self.shifts)
        spans = [(0, self.src.numel(), -1)] if per_row else list(self._groups())
        for begin, end, shift in spans:
            for low in range(begin, end, size):
                high = min(low + size, end)
                which: int | Tensor = shift
                if per_row and inverse is not None:
                    which = inverse[low:high]
                yield _Rows(self.src[low:high], self.dst[low:high], which)

    def _groups(self) -> Iterator[tuple[int, int, int]]:
        for shift, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            yield begin, end, shift


def splice(layout: KVLayout, src: Tensor, dst: Tensor, delta: Tensor | int, *, staged: bool) -> None:
    """``row dst[i] := row src[i] turned by delta[i]`` in every plane.

    Args:
        layout: a pool on the CPU.
        src: ``(n,)`` int64 slots.
        dst: ``(n,)`` int64 slots, all different.
        delta: ``(n,)`` int64, or one int.
        staged: gather all rows of a plane before writing any; needed when a source slot is also a destination.
    """
    plan = _Plan(src, dst, delta)
    tables = [cos_sin(rope, plan.shifts, torch.float32) for rope in layout.ropes]
    for plane in layout.planes:
        chunks = plan.chunks(max(1, CHUNK_BYTES // plane.row_bytes))
        if staged:
            ready = [(rows.dst, _turned(layout, plane, rows, plan.shifts, tables)) for rows in chunks]
            for where, values in ready:
                _scatter(plane.buffer, where, values)
        else:
            for rows in chunks:
                _scatter(plane.buffer, rows.dst, _turned(layout, plane, rows, plan.shifts, tables))


def rotate_in_place(layout: KVLayout, slots: Tensor, delta: Tensor | int) -> None:
    """Turn the rotary columns of ``slots``, touching no other byte. Shapes as for :func:`splice`."""
    plan = _Plan(slots, slots, delta)
    tables = [cos_sin(rope, plan.shifts, torch.float32) for rope in layout.ropes]
    for plane in layout.planes:
        if plane.rope_index < 0:
            continue
        rope = layout.ropes[plane.rope_index]
        band = plane.buffer[..., plane.rot_start : plane.rot_start + rope.rotary_dim]
        size = max(1, CHUNK_BYTES // (band[0].numel() * band.element_size()))
        for rows in plan.chunks(size):
            values = band.index_select(0, rows.src)
            _turn_rows(values, rope, rows.shift, plan.shifts, tables[plane.rope_index])
            band.index_copy_(0, rows.dst, values)


def _turned(layout: KVLayout, plane: Plane, rows: _Rows, shifts: Tensor, tables: list[CosSin]) -> Tensor:
    values = _gather(plane.buffer, rows.src)
    if plane.rope_index >= 0:
        rope = layout.ropes[plane.rope_index]
        band = values[..., plane.rot_start : plane.rot_start + rope.rotary_dim]
        _turn_rows(band, rope, rows.shift, shifts, tables[plane.rope_index])
    return values


def _turn_rows(band: Tensor, rope: RopeSpec, shift: int | Tensor, shifts: Tensor, table: CosSin) -> None:
    """Turn ``band`` ``(rows, heads, rotary_dim)`` in place; rows whose shift is 0 keep every bit."""
    if isinstance(shift, int):
        if int(shifts[shift]) != 0:
            turn_(band, rope, table[0][shift], table[1][shift])
        return
    still = (shifts[shift] == 0).nonzero().squeeze(1)
    kept = band[still]
    turn_(band, rope, table[0][shift].unsqueeze(1), table[1][shift].unsqueeze(1))
    band[still] = kept


def turn_(band: Tensor, rope: RopeSpec, cos: Tensor, sin: Tensor) -> None:
    """Turn ``band`` ``(rows, heads, rotary_dim)`` in place in float32 math; cos and sin broadcast over half of it."""
    wide = band.to(torch.promote_types(band.dtype, torch.float32))
    if rope.interleaved:
        turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
        band.copy_(torch.view_as_real(turned).flatten(-2))
        return
    half = rope.rotary_dim // 2
    a, b = wide[..., :half], wide[..., half:]
    # Both before either is written: of a float32 band, `wide` is the band itself.
    low, high = (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)
    band[..., :half], band[..., half:] = low, high


def _wide(buffer: Tensor) -> Tensor:
    """The same memory as ``(slots, n)`` of the widest elements that fit (a copy of those is a copy of the bits)."""
    flat = buffer.view(buffer.shape[0], -1)
    size = flat.element_size()
    for dtype in (torch.complex128, torch.int64):
        ratio = dtype.itemsize // size
        fits = flat.shape[1] % ratio == 0 and flat.stride(0) % ratio == 0 and flat.storage_offset() % ratio == 0
        if fits and flat.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat


def _gather(buffer: Tensor, slots: Tensor) -> Tensor:
    """Rows ``slots`` as a new ``(n, heads, width)``."""
    rows = _wide(buffer).index_select(0, slots)
    return rows.view(buffer.dtype).view(slots.numel(), *buffer.shape[1:])


def _scatter(buffer: Tensor, slots: Tensor, values: Tensor) -> None:
    wide = _wide(buffer)
    wide.index_copy_(0, slots, values.view(slots.numel(), -1).view(wide.dtype))
