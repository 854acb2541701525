"""Validation of the slots and shifts handed to the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import KVLayout


def check_slots(layout: KVLayout, name: str, slots: Tensor) -> None:
    """Raise ValueError unless ``slots`` is ``(n,)`` int64 beside the pool and, on the CPU, inside it.

    On CUDA the range is not looked at: it would make the host wait for the device.
    """
    if slots.dtype != torch.int64 or slots.ndim != 1:
        raise ValueError(f"{name} must be (n,) int64, not {tuple(slots.shape)} {slots.dtype}")
    if slots.device != layout.device:
        raise ValueError(f"{name} is on {slots.device}, the pool on {layout.device}")
    if slots.device.type == "cpu" and slots.numel():
        low, high = torch.aminmax(slots)
        if int(low) < 0 or int(high) >= layout.slots:
            raise ValueError(f"{name} holds slots outside [0, {layout.slots})")


def check_delta(delta: Tensor | int, rows: int) -> None:
    """Raise TypeError or ValueError unless ``delta`` is one int or ``(rows,)`` int64."""
    if isinstance(delta, Tensor):
        if delta.dtype != torch.int64 or delta.shape != (rows,):
            raise ValueError(f"delta must be one int or ({rows},) int64, not {tuple(delta.shape)} {delta.dtype}")
    elif isinstance(delta, bool) or not isinstance(delta, int):
        raise TypeError(f"delta must be an int or an int64 tensor, not {type(delta).__name__}")


def check_distinct(name: str, slots: Tensor, pool_slots: int) -> None:
    """Raise ValueError if a slot occurs twice (it would be written twice, in no defined order)."""
    if int(_marks(slots, pool_slots).sum()) != slots.numel():
        raise ValueError(f"{name} names a slot twice")


def reads_what_it_writes(src: Tensor, dst: Tensor, pool_slots: int) -> bool:
    """Whether a source slot is the destination of another row, so that the order of the writes would matter."""
    return bool((_marks(dst, pool_slots)[src] & (src != dst)).any())


def _marks(slots: Tensor, pool_slots: int) -> Tensor:
    marks = torch.zeros(pool_slots, dtype=torch.bool, device=slots.device)
    marks[slots] = True
    return marks
