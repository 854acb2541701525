"""Where the parts of attention lie in a pool: MLA (absorbed) and GQA brought to one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .layout import KVLayout, Plane, RopeSpec
from .segments import SegmentTable


@dataclass(frozen=True, eq=False)
class AttentionForm:
    """Attention of one layer.

    Every key head is a rotary part (columns ``[rot_start, rot_start + 2 * half)``) and a rest (``[rest_start,
    rest_start + rest)``). In MLA the value is the rest itself: the latent, shared by all query heads.
    """

    key: Plane
    value: Plane
    rope: RopeSpec | None
    rest_start: int
    rest: int
    value_width: int

    @classmethod
    def of(cls, layout: KVLayout, layer: int) -> AttentionForm:
        """The form of a layer.

        Raises:
            ValueError: no such layer.
        """
        latent = layout.kv_lora_rank
        per_layer = 1 if latent is not None else 2
        if not 0 <= layer < len(layout.planes) // per_layer:
            raise ValueError(f"no layer {layer} in a pool of {len(layout.planes) // per_layer}")
        key = layout.planes[layer * per_layer]
        rope = layout.ropes[key.rope_index] if key.rope_index >= 0 else None
        width = key.buffer.shape[2]
        if latent is not None:
            return cls(key, key, rope, 0, latent if rope else width, latent)
        value = layout.planes[layer * per_layer + 1]
        turning = rope.rotary_dim if rope else 0
        return cls(key, value, rope, turning, width - turning, value.buffer.shape[2])

    @property
    def half(self) -> int:
        """Pairs that turn in a key head."""
        return self.rope.rotary_dim // 2 if self.rope else 0


def check_query(form: AttentionForm, query: Tensor, table: SegmentTable, counts: Sequence[int]) -> None:
    """Raise ValueError unless query, table and pool fit together."""
    key = form.key.buffer
    if query.ndim != 3 or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        raise ValueError(f"query is {tuple(query.shape)}, the keys are (slots, {key.shape[1]}, {key.shape[2]})")
    if query.dtype != key.dtype or query.device != key.device or table.pages.device != key.device:
        raise ValueError("query, table and pool must share one device, query and pool one dtype")
    if not query.is_contiguous():
        raise ValueError("query must be contiguous")
    if len(counts) != len(table.lengths) or sum(counts) != query.shape[0]:
        raise ValueError(f"{len(table.lengths)} requests, query counts {list(counts)}, {query.shape[0]} queries")
    if any(not 0 < count <= length for count, length in zip(counts, table.lengths, strict=True)):
        raise ValueError("a request needs at least one query and at most as many as it has tokens")
