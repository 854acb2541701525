"""The splice and the in-place rotation in vectorised torch: the path of CPU pools.

Rows are put in order of their shift, so that each chunk has one shift and one cosine table (a splice has as many shifts
as it has segments). Runs of consecutive slots, which is what a pool mostly consists of, are read and written through
views; other rows are gathered and scattered through the widest element that divides a row. A chunk is large enough that
a torch call costs little beside it, and bounds the temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from .layout import KVLayout, Plane
from .torch_turn import Turns

# About the fastest of 64 KB to 4 MB: small chunks fit the second-level cache, but their calls cost more than it saves.
CHUNK_BYTES = 1024 * 1024
# With more distinct shifts than this per chunk of rows, one cosine row per token beats one chunk per shift.
_MIN_ROWS_PER_SHIFT = 32
# Runs shorter than this on average are gathered: a view costs as many torch calls as a chunk.
_MIN_RUN = 32

Where: TypeAlias = Tensor | slice
"""Slots of a chunk: ``(n,)`` int64, or a run of consecutive ones."""


@dataclass(frozen=True)
class _Rows:
    """Rows of one chunk: ``shift`` indexes the table of distinct shifts (an int for all, or one per row)."""

    src: Where
    dst: Where
    shift: int | Tensor


class _Plan:
    """Rows in order of their shift, those of a shift in runs of consecutive slots where there are such."""

    def __init__(self, src: Tensor, dst: Tensor, delta: Tensor | int, *, runs: bool = True) -> None:
        self.src, self.dst = src, dst
        self.shifts = torch.tensor([delta]) if isinstance(delta, int) else torch.unique(delta)
        self.inverse: Tensor | None = None
        bounds = [0, src.numel()]
        if not isinstance(delta, int):
            inverse = torch.searchsorted(self.shifts, delta)
            order = torch.argsort(inverse, stable=True)
            self.src, self.dst, inverse = src[order], dst[order], inverse[order]
            if src.numel() < _MIN_ROWS_PER_SHIFT * len(self.shifts):
                self.inverse = inverse
            else:
                bounds = [0, *torch.bincount(inverse).cumsum(0).tolist()]
        self.spans = [
            (*span, shift)
            for shift, (begin, end) in enumerate(pairwise(bounds))
            for span in (self._runs(begin, end) if runs and self.inverse is None else [(begin, end, False)])
        ]

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """The rows of one shift as ``(begin, end, whether they are a run)``."""
        steps = (self.src[begin + 1 : end] - self.src[begin : end - 1] != 1) | (
            self.dst[begin + 1 : end] - self.dst[begin : end - 1] != 1
        )
        breaks = (steps.nonzero().squeeze(1) + begin + 1).tolist()
        if end - begin < _MIN_RUN * (len(breaks) + 1):
            yield begin, end, False
            return
        for low, high in zip([begin, *breaks], [*breaks, end], strict=True):
            yield low, high, True

    def chunks(self, size: int) -> Iterator[_Rows]:
        """Every row once, at most ``size`` at a time."""
        for begin, end, run, shift in self.spans:
            if run:
                src, dst = int(self.src[begin]) - begin, int(self.dst[begin]) - begin
            for low in range(begin, end, size):
                high = min(low + size, end)
                if run:
                    yield _Rows(slice(src + low, src + high), slice(dst + low, dst + high), shift)
                else:
                    which = shift if self.inverse is None else self.inverse[low:high]
                    yield _Rows(self.src[low:high], self.dst[low:high], which)


def splice(layout: KVLayout, src: Tensor, dst: Tensor, delta: Tensor | int, *, staged: bool) -> None:
    """``row dst[i] := row src[i] turned by delta[i]`` in every plane.

    Args:
        layout: a pool on the CPU.
        src: ``(n,)`` int64 slots.
        dst: ``(n,)`` int64 slots, all different.
        delta: ``(n,)`` int64, or one int.
        staged: gather all rows of a plane before writing any; needed when a source slot is also a destination.
    """
    plan = _Plan(src, dst, delta, runs=not staged)
    by_rope = [Turns(rope, plan.shifts) for rope in layout.ropes]
    for plane in layout.planes:
        turns = by_rope[plane.rope_index] if plane.rope_index >= 0 else None
        chunks = plan.chunks(max(1, CHUNK_BYTES // plane.row_bytes))
        if not staged:
            for rows in chunks:
                _move(plane, rows, turns)
            continue
        ready = [(rows.dst, _turned(plane, rows, turns)) for rows in chunks]
        for where, values in ready:
            _scatter(plane.buffer, where, values)


def rotate_in_place(layout: KVLayout, slots: Tensor, delta: Tensor | int) -> None:
    """Turn the rotary columns of ``slots``, touching no other byte. Shapes as for :func:`splice`."""
    plan = _Plan(slots, slots, delta)
    by_rope = [Turns(rope, plan.shifts) for rope in layout.ropes]
    for plane in layout.planes:
        if plane.rope_index < 0:
            continue
        turns = by_rope[plane.rope_index]
        band = turns.band(plane.buffer, plane.rot_start)
        for rows in plan.chunks(max(1, CHUNK_BYTES // (band[0].numel() * band.element_size()))):
            if isinstance(rows.src, slice):
                turns.turn(band[rows.src], band[rows.src], rows.shift)
            else:
                values = band.index_select(0, rows.src)
                turns.turn(values, values, rows.shift)
                band.index_copy_(0, rows.src, values)


def _move(plane: Plane, rows: _Rows, turns: Turns | None) -> None:
    if not (isinstance(rows.src, slice) and isinstance(rows.dst, slice)):
        _scatter(plane.buffer, rows.dst, _turned(plane, rows, turns))
        return
    source, target = plane.buffer[rows.src], plane.buffer[rows.dst]
    if turns is None or turns.rope.rotary_dim < source.shape[-1]:
        target.copy_(source)
    if turns is not None:
        old, new = turns.band(source, plane.rot_start), turns.band(target, plane.rot_start)
        if not turns.turn(old, new, rows.shift):
            new.copy_(old)


def _turned(plane: Plane, rows: _Rows, turns: Turns | None) -> Tensor:
    values = _gather(plane.buffer, rows.src)
    if turns is not None:
        band = turns.band(values, plane.rot_start)
        turns.turn(band, band, rows.shift)
    return values


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
