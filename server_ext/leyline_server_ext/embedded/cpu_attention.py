"""Attention over SGLang's paged KV pool on the CPU: only the new queries, and no copy of K and V where none is needed.

SGLang's torch-native backend gathers K and V of the whole sequence and computes a query row for every cached token,
then throws those rows away. Here a sequence is described once per forward by the *runs* of consecutive pool slots that
hold it (one per allocation: a prefix, a spliced part, a new tail), and each layer reads the pool through views of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

FEW_QUERIES = 64
"""Up to here explicit products over views of the pool win; above, the fused kernel on gathered rows does."""

MAX_RUNS = 16
"""A sequence in more pieces than this is gathered into one: many small products cost more than the copy."""


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Where one sequence of a batch lies in the KV pool.

    Attributes:
        slots: pool slots of all its tokens in order, int64 ``(kv_len,)``.
        runs: the same as ``(first slot, length)`` pieces of consecutive slots.
        query_len: how many of its last tokens are the queries of this forward.
    """

    slots: torch.Tensor
    runs: tuple[tuple[int, int], ...]
    query_len: int

    @property
    def kv_len(self) -> int:
        """Number of tokens attended to by the last query."""
        return len(self.slots)


def plan_batch(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: Sequence[int], query_lens: Sequence[int]
) -> list[SequencePlan]:
    """Describe every sequence of a batch, once per forward.

    Args:
        req_to_token: pool slot of every token of every request, ``(max_requests, max_context)``.
        req_pool_indices: row of each sequence in ``req_to_token``, ``(batch,)``.
        seq_lens: tokens of each sequence including the new ones.
        query_lens: new tokens of each sequence.
    """
    plans = []
    for row, kv_len, query_len in zip(req_pool_indices.tolist(), seq_lens, query_lens, strict=True):
        slots = req_to_token[row, :kv_len].to(torch.int64)
        plans.append(SequencePlan(slots, _runs_of(slots), query_len))
    return plans


def _runs_of(slots: torch.Tensor) -> tuple[tuple[int, int], ...]:
    if len(slots) == 0:
        return ()
    breaks = torch.nonzero(slots.diff() != 1).flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(slots)]
    firsts = slots[starts].tolist()
    return tuple((first, end - start) for first, start, end in zip(firsts, starts, ends, strict=True))


def attend(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: SequencePlan, scale: float, causal: bool
) -> torch.Tensor:
    """Attention of the new queries of one sequence over all of its tokens.

    Query ``i`` of ``query_len`` sees the first ``kv_len - query_len + i + 1`` tokens if ``causal``, else all of them.
    Query head ``h`` reads KV head ``h // (heads / kv_heads)``.

    Args:
        query: ``(query_len, heads, head_dim)``.
        k_cache: the layer's K pool, ``(slots, kv_heads, head_dim)``, possibly of another dtype than the query.
        v_cache: the layer's V pool, ``(slots, kv_heads, v_head_dim)``; ``v_head_dim`` may differ (MLA).
        plan: where the sequence lies.
        scale: factor on the scores.
        causal: whether a query may only see its own position and earlier ones.

    Returns:
        ``(query_len, heads, v_head_dim)`` in the query's dtype.
    """
    if plan.query_len <= FEW_QUERIES:
        return _attend_few(query, _pieces(k_cache, plan), _pieces(v_cache, plan), scale, causal)
    keys, values = _one_piece(k_cache, plan), _one_piece(v_cache, plan)
    if keys.shape[-1] != values.shape[-1]:
        return _attend_in_blocks(query, keys, values, scale, causal)
    return _attend_fused(query, keys, values, scale, causal)


def _pieces(cache: torch.Tensor, plan: SequencePlan) -> list[torch.Tensor]:
    if len(plan.runs) > MAX_RUNS:
        return [cache.index_select(0, plan.slots)]
    return [cache[first : first + length] for first, length in plan.runs]


def _one_piece(cache: torch.Tensor, plan: SequencePlan) -> torch.Tensor:
    if len(plan.runs) == 1:
        first, length = plan.runs[0]
        return cache[first : first + length]
    return cache.index_select(0, plan.slots)


def _attend_few(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float, causal: bool
) -> torch.Tensor:
    """Explicit scores in fp32; `keys` and `values` are consecutive pieces ``(n, kv_heads, dim)`` of one sequence."""
    query_len, heads, _ = query.shape
    kv_heads = keys[0].shape[1]
    group = heads // kv_heads
    rows = query.float().mul(scale).view(query_len, kv_heads, group, -1)
    rows = rows.permute(1, 2, 0, 3).reshape(kv_heads, group * query_len, -1)
    parts = [torch.bmm(rows, piece.float().permute(1, 2, 0)) for piece in keys]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if causal and query_len > 1:
        newest = scores.view(kv_heads, group, query_len, -1)[..., -query_len:]
        newest.masked_fill_(torch.ones(query_len, query_len, dtype=torch.bool).triu(1), float("-inf"))
    weights = torch.softmax(scores, dim=-1).split([len(piece) for piece in values], dim=-1)
    out = torch.bmm(weights[0], values[0].float().transpose(0, 1))
    for weight, piece in zip(weights[1:], values[1:], strict=True):
        out.baddbmm_(weight, piece.float().transpose(0, 1))
    out = out.view(kv_heads, group, query_len, -1).permute(2, 0, 1, 3)
    return out.reshape(query_len, heads, -1).to(query.dtype)


def _attend_in_blocks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """The fused kernel wants equal K and V widths; MLA has 576 and 512, so it goes block of queries by block."""
    keys, values = keys.float(), values.float()
    before = len(keys) - len(query)
    blocks = []
    for start in range(0, len(query), FEW_QUERIES):
        block = query[start : start + FEW_QUERIES]
        seen = before + start + len(block) if causal else len(keys)
        blocks.append(_attend_few(block, [keys[:seen]], [values[:seen]], scale, causal))
    return torch.cat(blocks)


def _attend_fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    query_len, kv_len = len(query), len(keys)
    mask = None
    if causal and query_len < kv_len:  # is_causal aligns the mask to the upper left corner, ours is lower right
        mask = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.to(query.dtype).transpose(0, 1).unsqueeze(0),
        values.to(query.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)
