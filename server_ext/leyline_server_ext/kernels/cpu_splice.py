"""The splice and the in-place rotation of CPU pools: as `triton_splice`, with a compiled loop in the kernel's place.

Torch needs four passes over a key where one will do. Threads claim block after block inside the compiled loop: threads
that take turns at Python's lock, or wait for one that has not been woken yet, sleep longer than they work.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .angles import cos_sin
from .cpu_loops import row_mover
from .launch_plan import PlaneGroup, addresses, plane_groups
from .layout import KVLayout

BLOCK_BYTES = 128 * 1024
"""What a thread claims at a time: much more than the claim costs, and little to wait for at the end."""


def splice(layout: KVLayout, src: Tensor, dst: Tensor, delta: Tensor | int, *, staged: bool) -> None:
    """``row dst[i] := row src[i] turned by delta[i]`` in every plane.

    Args:
        layout: a pool on the CPU.
        src: ``(n,)`` int64 slots.
        dst: ``(n,)`` int64 slots, all different.
        delta: ``(n,)`` int64, or one int.
        staged: gather all rows of a plane before writing any; needed when a source slot is also a destination.
    """
    for group in plane_groups(layout):
        if staged:
            _splice_staged(group, src, dst, delta)
        else:
            _launch(group, src, dst, delta)


def rotate_in_place(layout: KVLayout, slots: Tensor, delta: Tensor | int) -> None:
    """Turn the rotary columns of ``slots``, touching no other byte. Shapes as for :func:`splice`."""
    for group in plane_groups(layout):
        turning = group.turning()
        if turning is not None:
            _launch(turning, slots, slots, delta, band_only=True)


def prepare(layout: KVLayout) -> None:
    """Compile what this pool needs, or load what an earlier process compiled."""
    none = torch.empty(0, dtype=torch.int64)
    splice(layout, none, none, 0, staged=False)
    rotate_in_place(layout, none, 0)


def _splice_staged(group: PlaneGroup, src: Tensor, dst: Tensor, delta: Tensor | int) -> None:
    """Through a buffer of one plane's rows, so that every row is read before any is written."""
    stage = torch.empty((src.numel(), group.heads, group.width), dtype=group.dtype)
    here, there = torch.arange(src.numel()), addresses([stage])
    for index in range(group.planes.numel()):
        one = group.only(index)
        _launch(one, src, here, delta, target=(there, stage.stride(0)))
        _launch(one, here, dst, 0, source=(there, stage.stride(0)))


def _launch(
    group: PlaneGroup,
    src: Tensor,
    dst: Tensor,
    delta: Tensor | int,
    *,
    source: tuple[Tensor, int] | None = None,
    target: tuple[Tensor, int] | None = None,
    band_only: bool = False,
) -> None:
    """Move rows of a group's planes; ``source`` and ``target`` are addresses and strides other than the group's own."""
    if isinstance(delta, int):
        shifts, which = torch.tensor([delta]), torch.zeros(src.numel(), dtype=torch.int64)
    else:
        shifts, which = torch.unique(delta.cpu(), return_inverse=True)
    which = torch.where(shifts[which] == 0, -1, which)
    cos, sin = cos_sin(group.phases, shifts[:, None, None])
    own = group.planes, group.stride
    (from_planes, from_stride), (to_planes, to_stride) = source or own, target or own
    move = row_mover(group.dtype, group.half, group.interleaved, not band_only)
    planes = from_planes.numpy(), from_stride, to_planes.numpy(), to_stride, group.ropes.numpy()
    shape = group.heads, group.width, group.rot_start
    block = max(1, BLOCK_BYTES // (group.heads * group.width * group.dtype.itemsize))
    blocks = -(-src.numel() // block) * len(group.planes)
    helpers = min(torch.get_num_threads(), blocks) - 1
    slots = src.contiguous().numpy(), dst.contiguous().numpy()  # strided ones would be compiled for on the spot
    _share(helpers, move, (block, *slots, which.numpy(), *planes, *shape, cos.numpy(), sin.numpy()))


def _share(helpers: int, move: Any, arguments: tuple[Any, ...]) -> None:
    """Call ``move`` here and on up to ``helpers`` threads. Who wakes up too late to find anything is not waited for."""
    claimed = np.zeros(1, np.int64)
    others = [_threads().submit(move, claimed, *arguments) for _ in range(helpers)]
    try:
        move(claimed, *arguments)
    finally:
        # The others write to the pool: nobody may go on before they are done.
        wait([other for other in others if not other.cancel()])
    for other in others:
        if not other.cancelled():
            other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="leyline-splice")
