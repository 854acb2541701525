from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from attention_cases import attention_must_match, batch
from kernel_pools import DTYPES, mha_pool, mla_pool, rope

from leyline_server_ext.kernels import KVLayout, Segment, SegmentTable, segment_attention, triton_attention
from leyline_server_ext.kernels.attention_form import AttentionForm

COMPLETE = os.environ.get("LEYLINE_KERNEL_MATRIX") == "complete"
# Pool and query heads. 576 is DeepSeek's row: latent 512, band 64.
POOLS = {
    "mla-576": (lambda n, t: mla_pool(n, t, 512, 64, [rope(64, True)]), 4),
    "mla-small-halves": (lambda n, t: mla_pool(n, t, 40, 24, [rope(24, False)]), 5),
    "mla-nope-layer": (lambda n, t: mla_pool(n, t, 48, 16, [None]), 4),
    "gqa-64": (lambda n, t: mha_pool(n, t, 2, 64, ropes=[rope(64, False)]), 6),
    "gqa-96-partial": (lambda n, t: mha_pool(n, t, 1, 96, 64, ropes=[rope(24, False)]), 3),
    "gqa-96": (lambda n, t: mha_pool(n, t, 2, 96, ropes=[rope(96, False)]), 2),
    "gqa-128": (lambda n, t: mha_pool(n, t, 1, 128, ropes=[rope(128, False)]), 4),
    "gqa-128-partial-pairs": (lambda n, t: mha_pool(n, t, 2, 128, ropes=[rope(64, True)]), 2),
    "gqa-64-nope-layer": (lambda n, t: mha_pool(n, t, 2, 64, ropes=[None]), 4),
}
COUNTS = {"decode": [1, 1, 1], "extend": [3, 1, 9]}
PAGES = [1, 16]
SPLITS = [1, 4]


def matrix() -> list[tuple[str, torch.dtype, str, int, int]]:
    if COMPLETE:
        return list(itertools.product(POOLS, DTYPES, COUNTS, PAGES, SPLITS))
    shapes = list(COUNTS)
    return [
        (pool, dtype, shapes[(i + j) % 2], PAGES[(i + j) % 2], SPLITS[(i + j // 2) % 2])
        for i, pool in enumerate(POOLS)
        for j, dtype in enumerate(DTYPES)
        if j == 0 or j == 1 + i % 2
    ]


def in_parts(splits: int) -> Any:
    def run(layout: KVLayout, layer: int, query: Any, table: Any, *, scale: float, query_counts: list[int]) -> Any:
        form = AttentionForm.of(layout, layer)
        return triton_attention.segment_attention(form, query, table, query_counts, scale, splits=splits)

    return run


@pytest.mark.parametrize(("pool", "dtype", "shape", "page", "splits"), matrix())
def test_attention(pool: str, dtype: torch.dtype, shape: str, page: int, splits: int) -> None:
    make, heads = POOLS[pool]
    attention_must_match(make(640, dtype), 0, heads, batch(640, page), COUNTS[shape], in_parts(splits))


@pytest.mark.parametrize("pool", ["mla-576", "gqa-64"] if COMPLETE else ["gqa-64"])
def test_long_context_split_by_itself(pool: str) -> None:
    make, heads = POOLS[pool]
    layout = make(5000, torch.bfloat16)
    attention_must_match(layout, 0, heads, batch(5000, long=4097), [1, 1, 1], segment_attention)


def test_one_token_and_more_parts_than_tokens() -> None:
    layout = POOLS["gqa-64"][0](10, torch.float32)
    table = SegmentTable.build([[Segment(torch.tensor([7]), 1, -3)], [Segment(torch.tensor([2, 9]), 2, 0)]])
    attention_must_match(layout, 0, 6, table, [1, 2], in_parts(8))
    attention_must_match(layout, 0, 6, table, [1, 1], in_parts(1))
