"""The rotation itself in vectorised torch: rows of one shift, or of a shift each, in float32 math.

What torch calls cost on a CPU is mostly the start of an inner loop, and one that broadcasts or strides over half a head
starts every 32 numbers. So cosines and sines are laid out as wide and as long as what they are multiplied with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .angles import cos_sin
from .layout import RopeSpec

Factors = tuple[Tensor, ...]
"""What `turn` multiplies by, broadcast over ``(rows, heads, rotary_dim)``: cosines and signed sines of that width, or,
for interleaved pairs, one complex tensor of half of it."""


def factors(rope: RopeSpec, cos: Tensor, sin: Tensor) -> Factors:
    """For cosines and sines ``(..., rotary_dim // 2)`` float32."""
    if rope.interleaved:
        return (torch.complex(cos, sin),)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def turn(source: Tensor, target: Tensor, by: Factors) -> None:
    """``target := source`` turned ``by`` factors, both ``(rows, heads, rotary_dim)``; they may be the same tensor."""
    wide = source.to(torch.float32)
    if len(by) == 1:
        if wide is source:
            wide = source.clone(memory_format=torch.contiguous_format)
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        target.copy_(torch.view_as_real(pairs.mul_(by[0])).flatten(-2))
        return
    half = wide.shape[-1] // 2
    cos, sin = by
    other = torch.cat((wide[..., half:], wide[..., :half]), -1)
    if wide is source:
        torch.mul(wide, cos, out=target).addcmul_(other, sin)
    else:
        target.copy_(wide.mul_(cos).addcmul_(other, sin))


class Turns:
    """Factors of one rope for the distinct shifts of a splice.

    Args:
        rope: how the layer rotates.
        shifts: ``(s,)`` int64.
    """

    def __init__(self, rope: RopeSpec, shifts: Tensor) -> None:
        self.rope = rope
        self._shifts = shifts
        self._factors = factors(rope, *cos_sin(rope, shifts, torch.float32))
        self._still = (shifts == 0).tolist()
        self._laid_out: dict[tuple[int, int], Factors] = {}

    def band(self, rows: Tensor, start: int) -> Tensor:
        """The rotary columns of ``rows``, which begin at ``start``."""
        return rows[..., start : start + self.rope.rotary_dim]

    def turn(self, source: Tensor, target: Tensor, shift: int | Tensor) -> bool:
        """`turn` by shift number ``shift``, or, for a tensor ``(rows,)``, each row by its own.

        Returns:
            False where nothing turns: ``target`` is as it was.
        """
        if isinstance(shift, int):
            if self._still[shift]:
                return False
            turn(source, target, self._of(shift, source.shape[0], source.shape[1]))
            return True
        still = (self._shifts[shift] == 0).nonzero().squeeze(1)
        kept = source[still]
        turn(source, target, tuple(factor[shift].unsqueeze(1) for factor in self._factors))
        target[still] = kept
        return True

    def _of(self, shift: int, rows: int, heads: int) -> Factors:
        """The factors of a shift, written out for every row and head. Chunks differ little: the longest serves all."""
        laid_out = self._laid_out.get((shift, heads))
        if laid_out is None or laid_out[0].shape[0] < rows:
            laid_out = tuple(factor[shift].expand(rows, heads, -1).contiguous() for factor in self._factors)
            self._laid_out[shift, heads] = laid_out
        return tuple(factor[:rows] for factor in laid_out)
