"""What the kernels need to know about a KV pool, made once per server.

A pool is described as a list of *planes*. A plane is one tensor ``(slots, heads, width)`` of which, in every row
(one slot) and every head, the columns ``[rot_start, rot_start + rotary_dim)`` carry rotary position and all others do
not::

    MLA    one plane per layer    heads = 1           [ latent ............ | rotary band ]   rot_start = kv_lora_rank
    MHA    K plane per layer      heads = kv_heads    [ rotary part | rest of the head    ]   rot_start = 0
    MHA    V plane per layer      heads = kv_heads    [ nothing rotary                    ]   rope = None

A plane whose rope is None (V, and K of a layer without position encoding) is copied, never rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class RopeSpec:
    """The rotary embedding of one layer.

    Attributes:
        inv_freq: ``(rotary_dim // 2,)`` float32 or float64 on the CPU, radians per position: the layer's own effective
            inverse frequencies (YaRN or Llama-3 scaling included; a magnitude such as YaRN's mscale is *not*).
        rotary_dim: how many columns of a head are rotated.
        interleaved: True for pairs ``(2i, 2i + 1)`` (DeepSeek, ``is_neox_style=False``), False for pairs
            ``(i, i + rotary_dim // 2)`` (Llama, Qwen).

    Raises:
        ValueError: the three do not fit together.
    """

    inv_freq: Tensor
    rotary_dim: int
    interleaved: bool

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be even and positive, not {self.rotary_dim}")
        if self.inv_freq.shape != (self.rotary_dim // 2,):
            raise ValueError(f"inv_freq must be ({self.rotary_dim // 2},), not {tuple(self.inv_freq.shape)}")
        if self.inv_freq.dtype not in (torch.float32, torch.float64) or self.inv_freq.device.type != "cpu":
            raise ValueError(f"inv_freq must be float32 or float64 on the CPU, not {self.inv_freq.dtype}")
        if not bool(torch.isfinite(self.inv_freq).all()):
            raise ValueError("inv_freq has values that are not finite")

    def key(self) -> tuple[int, bool, tuple[float, ...]]:
        """Equal for two layers exactly when they rotate alike."""
        return self.rotary_dim, self.interleaved, tuple(self.inv_freq.double().tolist())


@dataclass(frozen=True, eq=False)
class Plane:
    """One tensor of the pool; see the module docstring. ``rope_index`` is -1 where nothing is rotated."""

    buffer: Tensor
    rot_start: int
    rope_index: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot in this plane."""
        return self.buffer[0].numel() * self.buffer.element_size()


@dataclass(frozen=True, eq=False)
class KVLayout:
    """A KV pool as the kernels see it. Use :meth:`mla` or :meth:`mha`; holds the pool's tensors, copies nothing.

    Attributes:
        planes: every tensor of the pool.
        ropes: the distinct rotary embeddings; ``Plane.rope_index`` points here.
        slots: rows in every plane.
        kv_lora_rank: width of the latent of an MLA pool, None for MHA.
    """

    planes: tuple[Plane, ...]
    ropes: tuple[RopeSpec, ...]
    slots: int
    kv_lora_rank: int | None = None

    @classmethod
    def mla(cls, buffers: Sequence[Tensor], ropes: Sequence[RopeSpec | None], kv_lora_rank: int) -> KVLayout:
        """A latent-attention pool.

        Args:
            buffers: per layer ``(slots, 1, kv_lora_rank + qk_rope_head_dim)``; the last ``qk_rope_head_dim`` columns
                are the rotary band, everything before is copied bit for bit.
            ropes: per layer; None for a layer without position encoding.
            kv_lora_rank: width of the latent.

        Raises:
            ValueError: shapes, dtypes, devices or ropes do not fit together.
        """
        _same_length(buffers, ropes)
        table = _RopeTable()
        planes = []
        for buffer, rope in zip(buffers, ropes, strict=True):
            band = buffer.shape[-1] - kv_lora_rank
            if rope is not None and rope.rotary_dim != band:
                raise ValueError(f"the band after the latent is {band} wide, the rope turns {rope.rotary_dim}")
            planes.append(Plane(buffer, kv_lora_rank, table.index(rope)))
        return cls._checked(planes, table, kv_lora_rank)

    @classmethod
    def mha(
        cls, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], ropes: Sequence[RopeSpec | None]
    ) -> KVLayout:
        """A multi-head or grouped-query pool.

        Args:
            k_buffers: per layer ``(slots, kv_heads, head_dim)``; the first ``rotary_dim`` columns of every head turn.
            v_buffers: per layer ``(slots, kv_heads, v_head_dim)``; copied bit for bit.
            ropes: per layer; None for a layer without position encoding.

        Raises:
            ValueError: shapes, dtypes, devices or ropes do not fit together.
        """
        _same_length(k_buffers, ropes)
        _same_length(v_buffers, ropes)
        table = _RopeTable()
        planes = []
        for k, v, rope in zip(k_buffers, v_buffers, ropes, strict=True):
            if rope is not None and rope.rotary_dim > k.shape[-1]:
                raise ValueError(f"a head of {k.shape[-1]} cannot have {rope.rotary_dim} rotary columns")
            planes += [Plane(k, 0, table.index(rope)), Plane(v, 0, -1)]
        return cls._checked(planes, table, None)

    @classmethod
    def _checked(cls, planes: list[Plane], table: _RopeTable, kv_lora_rank: int | None) -> KVLayout:
        if not planes:
            raise ValueError("a KV layout needs at least one layer")
        first = planes[0].buffer
        for plane in planes:
            buffer = plane.buffer
            if buffer.ndim != 3 or buffer.shape[0] != first.shape[0] or buffer.device != first.device:
                raise ValueError("every buffer must be (slots, heads, width) with the same slots on the same device")
            if buffer.dtype not in CACHE_DTYPES:
                raise ValueError(f"cannot rotate a cache of {buffer.dtype}")
            if buffer.stride(2) != 1 or buffer.stride(1) != buffer.shape[2]:
                raise ValueError("the heads and columns of one slot must lie next to each other")
        return cls(tuple(planes), tuple(table.ropes), first.shape[0], kv_lora_rank)

    @property
    def device(self) -> torch.device:
        """Where the pool lives."""
        return self.planes[0].buffer.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token occupies over all layers."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def rotary_bytes_per_token(self) -> int:
        """Bytes of one token, over all layers, that a rotation changes."""
        total = 0
        for plane in self.planes:
            if plane.rope_index >= 0:
                width = self.ropes[plane.rope_index].rotary_dim
                total += plane.buffer.shape[1] * width * plane.buffer.element_size()
        return total


class _RopeTable:
    """Collects the distinct ropes of a pool."""

    def __init__(self) -> None:
        self.ropes: list[RopeSpec] = []
        self._index: dict[tuple[int, bool, tuple[float, ...]], int] = {}

    def index(self, rope: RopeSpec | None) -> int:
        if rope is None:
            return -1
        found = self._index.setdefault(rope.key(), len(self.ropes))
        if found == len(self.ropes):
            self.ropes.append(rope)
        return found


def _same_length(buffers: Sequence[Tensor], ropes: Sequence[RopeSpec | None]) -> None:
    if len(buffers) != len(ropes):
        raise ValueError(f"{len(buffers)} buffers but {len(ropes)} ropes")
