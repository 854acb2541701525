"""Pools, ropes and slot lists for the kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leyline_server_ext.kernels import KVLayout, RopeSpec, reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (atol, rtol) of float32 math followed by one rounding to the cache dtype, against float64 math rounded once.
# rtol: the two may round to neighbours, one unit in the last place, 2**-7 (bf16) or 2**-10 (fp16) of the value.
# atol: a*cos - b*sin in float32 has three roundings and two rounded factors, at most 4 * 2**-24 * (|a| + |b|), and a
# sum near zero keeps that error: 2.4e-6 for normal values, which stay below 5 here.
TOLERANCE = {torch.bfloat16: (2.4e-6, 2**-7), torch.float16: (2.4e-6, 2**-10), torch.float32: (2.4e-6, 0.0)}


def rope(rotary_dim: int, interleaved: bool, base: float = 10000.0) -> RopeSpec:
    half = rotary_dim // 2
    return RopeSpec(base ** -(torch.arange(half, dtype=torch.float64) / half), rotary_dim, interleaved)


def mla_pool(
    slots: int,
    dtype: torch.dtype,
    latent: int = 32,
    band: int = 16,
    ropes: list[RopeSpec | None] | None = None,
    device: str = "cpu",
) -> KVLayout:
    ropes = [rope(band, True)] * 2 if ropes is None else ropes
    buffers = [torch.randn(slots, 1, latent + band).to(dtype).to(device) for _ in ropes]
    return KVLayout.mla(buffers, ropes, latent)


def mha_pool(
    slots: int,
    dtype: torch.dtype,
    heads: int = 2,
    head_dim: int = 32,
    v_dim: int | None = None,
    ropes: list[RopeSpec | None] | None = None,
    device: str = "cpu",
) -> KVLayout:
    ropes = [rope(head_dim, False)] * 2 if ropes is None else ropes
    k = [torch.randn(slots, heads, head_dim).to(dtype).to(device) for _ in ropes]
    v = [torch.randn(slots, heads, v_dim or head_dim).to(dtype).to(device) for _ in ropes]
    return KVLayout.mha(k, v, ropes)


def move(slots: int, rows: int) -> tuple[Tensor, Tensor]:
    """``rows`` source slots and as many other slots, in no order."""
    order = torch.randperm(slots)
    return order[:rows].clone(), order[rows : 2 * rows].clone()


def snapshot(layout: KVLayout) -> list[Tensor]:
    return [plane.buffer.clone() for plane in layout.planes]


def poison(layout: KVLayout, slots: Tensor) -> None:
    for plane in layout.planes:
        plane.buffer[slots] = float("nan")


def bits(x: Tensor) -> Tensor:
    """The same memory as integers: equality of these is equality of the bytes."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(width)


def assert_rounded_not_cut(got: Tensor, want: Tensor) -> None:
    """Of 16-bit results, nearly all equal the rounded float64: a kernel that cuts would miss half of them."""
    if got.element_size() == 2:
        assert int((bits(got) != bits(want)).sum()) <= 2 + got.numel() // 200


Splice = Callable[[KVLayout, Tensor, Tensor, Tensor | int], None]


def splice_must_match(layout: KVLayout, src: Tensor, dst: Tensor, delta: Tensor | int, splice: Splice) -> None:
    """Splice and compare: rotated columns within TOLERANCE, all other bytes and rows of shift 0 equal bit for bit,
    poisoned destinations fully written, slots not named untouched."""
    rows = torch.full_like(src, delta) if isinstance(delta, int) else delta
    expected = reference.splice(layout, src, dst, rows)
    before = snapshot(layout)
    poison(layout, dst[~torch.isin(dst, src)])
    splice(layout, src, dst, delta)
    untouched = torch.ones(layout.slots, dtype=torch.bool)
    untouched[dst] = False
    for plane, want, old in zip(layout.planes, expected, before, strict=True):
        got = plane.buffer
        atol, rtol = TOLERANCE[got.dtype]
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
        assert_rounded_not_cut(got, want)
        still = torch.ones(got.shape[-1], dtype=torch.bool)
        if plane.rope_index >= 0:
            still[plane.rot_start : plane.rot_start + layout.ropes[plane.rope_index].rotary_dim] = False
        assert torch.equal(bits(got[..., still]), bits(want[..., still]))
        assert torch.equal(bits(got[dst[rows == 0]]), bits(old[src[rows == 0]]))
        assert torch.equal(bits(got[untouched]), bits(old[untouched]))
