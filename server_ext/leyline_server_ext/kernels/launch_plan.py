"""A pool sorted into groups of planes that one launch can take, with the tables a launch needs on the device.

Planes of one group have the same row shape, dtype, stride and rotary columns, or no rotation at all: V planes and
layers without position encoding join a rotating group of the same row shape. Most pools are one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .angles import turn_phases
from .layout import KVLayout, Plane

# Bytes of a row block that one program holds: four 16-byte vectors in each of 128 threads; and at least so many bytes
# of rotary columns that each thread has one such vector.
TILE_BYTES = 8 * 1024
_BAND_BYTES = 2 * 1024
_MAX_ROWS = 64


@dataclass(frozen=True)
class Blocks:
    """Tile of one program: rows and heads (powers of two), and columns at a time for each part of a row."""

    rows: int
    heads: int
    half: int
    rest: int
    copy: int


@dataclass(frozen=True, eq=False)
class PlaneGroup:
    """Planes of one launch.

    Attributes:
        planes: ``(planes,)`` int64 base addresses on the device.
        ropes: ``(planes,)`` int32 rows of ``phases``, -1 where nothing turns.
        phases: ``(ropes, half)`` int64, see :func:`angles.turn_phases`.
        stride: elements from one slot to the next.
        half: pairs that turn in a head (0: none in the whole group).
        align: bytes that every base address and slot is a multiple of, at most 16.
    """

    planes: Tensor
    ropes: Tensor
    phases: Tensor
    dtype: torch.dtype
    stride: int
    heads: int
    width: int
    rot_start: int
    half: int
    interleaved: bool
    align: int

    def blocks(self, *, band_only: bool) -> Blocks:
        """Tile sizes for this geometry."""
        columns = 2 * self.half if band_only else self.width
        head_bytes = columns * self.dtype.itemsize
        heads = min(_power_above(self.heads), max(1, _power_below(TILE_BYTES // head_bytes)))
        rows = max(_power_below(TILE_BYTES // (heads * head_bytes)), self._rows_of_band(heads))
        rows = min(max(rows, 1), _MAX_ROWS)
        copy = min(_power_above(self.heads * self.width), max(64, TILE_BYTES // (rows * self.dtype.itemsize)))
        rest = max(self.rot_start, self.width - self.rot_start - 2 * self.half, 1)
        return Blocks(rows, heads, _power_above(max(self.half, 1)), _power_above(rest), copy)

    def _rows_of_band(self, heads: int) -> int:
        return _power_below(_BAND_BYTES // (heads * 2 * self.half * self.dtype.itemsize)) if self.half else 0

    def turning(self) -> PlaneGroup | None:
        """The planes that turn, or None."""
        index = (self.ropes >= 0).nonzero().squeeze(1)
        return replace(self, planes=self.planes[index], ropes=self.ropes[index]) if index.numel() else None

    def only(self, index: int) -> PlaneGroup:
        """One plane."""
        return replace(self, planes=self.planes[index : index + 1], ropes=self.ropes[index : index + 1])

    def with_stride(self, stride: int) -> PlaneGroup:
        """The same rows laid out with another slot stride (a fresh, aligned buffer)."""
        return replace(self, stride=stride)


_PLANS: WeakKeyDictionary[KVLayout, tuple[PlaneGroup, ...]] = WeakKeyDictionary()


def plane_groups(layout: KVLayout) -> tuple[PlaneGroup, ...]:
    """The launches that cover ``layout``; made on first use, kept as long as the layout."""
    found = _PLANS.get(layout)
    if found is None:
        found = _PLANS[layout] = tuple(_group(layout, members) for members in _sorted(layout))
    return found


def addresses(buffers: Sequence[Tensor]) -> Tensor:
    """``(n,)`` int64 base addresses on the device of the buffers."""
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=buffers[0].device)


def _sorted(layout: KVLayout) -> list[list[Plane]]:
    turning: dict[tuple[object, ...], list[Plane]] = {}
    still: dict[tuple[object, ...], list[Plane]] = {}
    for plane in layout.planes:
        if plane.rope_index < 0:
            still.setdefault(_shape(plane), []).append(plane)
        else:
            rope = layout.ropes[plane.rope_index]
            key = (*_shape(plane), plane.rot_start, rope.rotary_dim, rope.interleaved)
            turning.setdefault(key, []).append(plane)
    for key, members in turning.items():
        members += still.pop(key[:-3], [])
    return [*turning.values(), *still.values()]


def _shape(plane: Plane) -> tuple[object, ...]:
    buffer = plane.buffer
    return buffer.dtype, buffer.stride(0), buffer.shape[1], buffer.shape[2]


def _group(layout: KVLayout, members: list[Plane]) -> PlaneGroup:
    first = members[0]
    used = sorted({plane.rope_index for plane in members} - {-1})
    phases = [turn_phases(layout.ropes[index]) for index in used] or [torch.zeros(1, dtype=torch.int64)]
    rope = layout.ropes[used[0]] if used else None
    ids = [used.index(plane.rope_index) if plane.rope_index >= 0 else -1 for plane in members]
    size = first.buffer.element_size()
    align = 16
    while any(plane.buffer.data_ptr() % align for plane in members):
        align //= 2
    return PlaneGroup(
        planes=addresses([plane.buffer for plane in members]),
        ropes=torch.tensor(ids, dtype=torch.int32, device=layout.device),
        phases=torch.stack(phases).to(layout.device),
        dtype=first.buffer.dtype,
        stride=first.buffer.stride(0),
        heads=first.buffer.shape[1],
        width=first.buffer.shape[2],
        rot_start=first.rot_start if rope else 0,
        half=rope.rotary_dim // 2 if rope else 0,
        interleaved=bool(rope and rope.interleaved),
        align=max(align, size),
    )


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 0
