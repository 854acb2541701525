"""Batches and the comparison for the segment attention tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_pools import bits, snapshot
from torch import Tensor

from leyline_server_ext.kernels import KVLayout, Segment, SegmentTable, reference


def batch(slots: int, page: int = 1, long: int = 0) -> SegmentTable:
    """Three requests: a head and a moved tail with a dropped span between; one short segment; a far shift that starts
    inside a page. With ``long``, the first request gets that many tokens more."""
    pages = torch.randperm(slots // page)

    def segment(first: int, length: int, delta: int, skip: int = 0) -> Segment:
        return Segment(pages[first // page : (first + skip + length - 1) // page + 1], length, delta, skip)

    skip = min(5, page - 1)
    first = [segment(0, 70, 0), segment(96, 41, -500, skip), segment(160, 1, 12)]
    if long:
        first.append(segment(176, long, -777))
    return SegmentTable.build(
        [first, [segment(0, 7, 3)], [segment(192, 130, 70000, skip), segment(352, 33, 0)]], page_size=page
    )


def attention_must_match(
    layout: KVLayout, layer: int, heads: int, table: SegmentTable, counts: list[int], attention: Callable[..., Tensor]
) -> None:
    """Compare with materialised splice + ordinary attention in float64, and see that the pool is only read.

    The tolerance is the error that a slow float32 reference makes which rounds where the kernel must (softmax
    numerators to the cache dtype, the result to the cache dtype): twice its largest, since sums in another order round
    differently, and of float32 results that of another order of the sum, 8 units.
    """
    before = snapshot(layout)
    dtype = layout.planes[0].buffer.dtype
    query = torch.randn(sum(counts), heads, layout.planes[0].buffer.shape[2]).to(dtype)
    scale = 0.3
    exact = reference.segment_attention(layout, layer, query, table, counts, scale)
    rounding = reference.segment_attention(
        layout, layer, query, table, counts, scale, torch.float32, rounded_weights=True
    ).to(dtype)
    got = attention(layout, layer, query, table, scale=scale, query_counts=counts)
    assert got.dtype == dtype
    assert got.shape == exact.shape
    floor = 8 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    tolerance = max(2 * float((rounding - exact).abs().max()), floor)
    assert float((got - exact).abs().max()) <= tolerance
    for plane, old in zip(layout.planes, before, strict=True):
        assert torch.equal(bits(plane.buffer), bits(old))
