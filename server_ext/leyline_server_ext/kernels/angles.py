"""Exact rotation angles for large shifts.

``delta * inv_freq`` in float32 is wrong by half a unit in the last place of a number of that size: at a shift of
1,000,000 positions and inv_freq 1 that is 0.03 rad. Here it is taken in 64-bit fixed point: inv_freq as a fraction of a
turn times 2**64, once per server; an int64 product wraps round exactly at full turns, so what is left is the phase
(error below delta * 2**-65 turns plus what inv_freq itself was rounded by).
"""

from __future__ import annotations

from fractions import Fraction
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .layout import RopeSpec

# 60 digits of pi; the fixed point needs 20.
_TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494")


def cos_sin(phases: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32, of the angle that ``delta`` positions make.

    Args:
        phases: int64, see `turn_phases`.
        delta: int64; broadcast against ``phases``.
    """
    angle = (phases * delta).double() * float(_TWO_PI / 2**64)
    return angle.cos().float(), angle.sin().float()


_PHASES: WeakKeyDictionary[RopeSpec, dict[torch.device, Tensor]] = WeakKeyDictionary()


def turn_phases_on(rope: RopeSpec, device: torch.device) -> Tensor:
    """:func:`turn_phases` on a device, worked out once per rope."""
    kept = _PHASES.setdefault(rope, {})
    if device not in kept:
        kept[device] = turn_phases(rope).to(device)
    return kept[device]


def turn_phases(rope: RopeSpec) -> Tensor:
    """``(rotary_dim // 2,)`` int64 on the CPU: inv_freq in 2**-64 turns per position, modulo one turn."""
    phases = []
    for value in rope.inv_freq.double().tolist():
        turns = round(Fraction(value) * 2**64 / _TWO_PI) % 2**64
        phases.append(turns - 2**64 if turns >= 2**63 else turns)
    return torch.tensor(phases, dtype=torch.int64)
