from __future__ import annotations

import pytest
import torch
from attention_cases import attention_must_match, batch
from kernel_pools import DTYPES, mha_pool, mla_pool, rope

from leyline_server_ext.kernels import KVLayout, Segment, SegmentTable, segment_attention

POOLS = {
    "mla": (lambda n, t: mla_pool(n, t), 4),
    "mla-nope-layer": (lambda n, t: mla_pool(n, t, 32, 16, [None]), 4),
    "gqa": (lambda n, t: mha_pool(n, t, 2, 32, 20, [rope(32, False)]), 6),
    "gqa-partial-pairs": (lambda n, t: mha_pool(n, t, 2, 32, ropes=[rope(16, True)]), 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("page", [1, 16])
def test_attention_is_splice_then_attention(pool: str, dtype: torch.dtype, page: int) -> None:
    make, heads = POOLS[pool]
    layout = make(640, dtype)
    attention_must_match(layout, 0, heads, batch(640, page), [1, 3, 7], segment_attention)
    attention_must_match(layout, 0, heads, batch(640, page), [1, 1, 1], segment_attention)


def table_of_one() -> tuple[KVLayout, SegmentTable]:
    return mha_pool(8, torch.float32), SegmentTable.build([[Segment(torch.arange(4), 4, 1)]])


def test_bad_tables_are_refused() -> None:
    pages = torch.arange(4)
    with pytest.raises(ValueError, match="does not fit"):
        SegmentTable.build([[Segment(pages, 5, 0)]])
    with pytest.raises(ValueError, match="at least one token"):
        SegmentTable.build([[]])
    with pytest.raises(ValueError, match="after 2 of a page of 2"):
        SegmentTable.build([[Segment(pages, 1, 0, skip=2)]], page_size=2)
    with pytest.raises(ValueError, match="int64"):
        SegmentTable.build([[Segment(pages.int(), 1, 0)]])


def test_bad_queries_are_refused() -> None:
    layout, table = table_of_one()
    good = torch.randn(1, 4, 32)
    for query, counts, message in (
        (torch.randn(1, 3, 32), None, "query is"),
        (torch.randn(1, 4, 30), None, "query is"),
        (good.half(), None, "one dtype"),
        (good, [2], "query counts"),
        (torch.randn(5, 4, 32), [5], "at least one query"),
        (torch.randn(1, 32, 4).mT, None, "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            segment_attention(layout, 0, query, table, scale=1.0, query_counts=counts)
    with pytest.raises(ValueError, match="no layer 2"):
        segment_attention(layout, 2, good, table, scale=1.0)
