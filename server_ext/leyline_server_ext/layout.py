"""Describe a server's KV pool and rotary modules to the kernels, and check the description on the model's own RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from leyline_client._wire import RopeInfo

from . import compat
from .kernels import KVLayout, RopeSpec
from .kernels.reference import rotate as rotate_reference

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHECK_TOLERANCE = 2e-3
"""Largest relative error of the self-check: the modules under test keep their cos/sin tables in float32 or bfloat16."""


class UnsupportedLayout(Exception):
    """This pool or model is not known to be safe to splice; ``code`` says why (see `refusals`)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Described:
    """The pool for the kernels, and what ``info`` tells of it."""

    layout: KVLayout
    rope: RopeInfo
    kv_dtype: str


def describe(model: Any, pool: Any) -> Described:
    """Layout of ``pool`` for ``model``.

    Raises:
        UnsupportedLayout: something about them is not known to be safe.
    """
    kind = compat.pool_kind(pool)
    if kind is None:
        raise UnsupportedLayout("kv_pool", f"KV pool {type(pool).__name__} cannot be spliced")
    if pool.dtype not in SUPPORTED_DTYPES or pool.store_dtype != pool.dtype:
        raise UnsupportedLayout("kv_dtype", f"KV cache dtype {pool.dtype} cannot be rotated without loss")
    layers = dict(compat.attention_layers(model))
    wanted = range(pool.start_layer, pool.start_layer + pool.layer_num)
    if any(layer not in layers for layer in wanted):
        raise UnsupportedLayout("attention_layers", "not every layer of the KV pool belongs to a plain attention layer")
    specs: dict[int, RopeSpec | None] = {}
    ropes = [_spec(layers[layer], specs) for layer in wanted]
    if kind == "mla":
        if any(rope is not None and rope.rotary_dim != pool.qk_rope_head_dim for rope in ropes):
            raise UnsupportedLayout("rope_dim", "the rotary band is not the last qk_rope_head_dim of the row")
        layout = KVLayout.mla(pool.kv_buffer, ropes, pool.kv_lora_rank)
    else:
        layout = KVLayout.mha(pool.k_buffer, pool.v_buffer, ropes)
    turned = [rope for rope in ropes if rope is not None]
    if not turned:
        raise UnsupportedLayout("rope_class", "the model has no rotary embedding that Leyline knows")
    info = RopeInfo(
        kind="mla" if kind == "mla" else "mha",
        rotary_dim=turned[0].rotary_dim,
        interleaved=turned[0].interleaved,
        layers=len(ropes),
        nope_layers=len(ropes) - len(turned),
        scaling=_scaling(next(layers[layer] for layer in wanted if layers[layer] is not None)),
    )
    return Described(layout, info, str(pool.dtype).removeprefix("torch."))


def _spec(rotary: Any, known: dict[int, RopeSpec | None]) -> RopeSpec | None:
    """The rotary module's specification; layers that share a module share it."""
    if id(rotary) not in known:
        known[id(rotary)] = None if rotary is None else _checked_spec(rotary)
    return known[id(rotary)]


def _checked_spec(rotary: Any) -> RopeSpec:
    frequencies = compat.inverse_frequencies(rotary)
    if frequencies is None:
        raise UnsupportedLayout("rope_class", f"rotary embedding {type(rotary).__name__} is not supported")
    spec = RopeSpec(inv_freq=frequencies, rotary_dim=rotary.rotary_dim, interleaved=not rotary.is_neox_style)
    error = self_check(rotary, spec)
    if not error < _CHECK_TOLERANCE:
        raise UnsupportedLayout(
            "rope_check", f"rotating by the formula differs from the model's own RoPE by {error:.1e}"
        )
    return spec


@torch.no_grad()
def self_check(rotary: Any, spec: RopeSpec) -> float:
    """Relative error of "rotate by Δ" against the model's own module asked at both positions.

    RoPE's closure, R(a)R(b) = R(a+b) (seed: Leyline summary §2.2), is what every splice relies on.

    The module's table may be rounded to the model's dtype; positions are chosen small to keep that error small.
    """
    device = rotary.cos_sin_cache.device
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(4, rotary.rotary_dim, generator=generator).to(device)
    before = torch.tensor([3, 5, 40, 250], device=device)
    deltas = torch.tensor([-3, -4, 23, -200], device=device)

    def at(positions: torch.Tensor) -> torch.Tensor:
        return _rope(rotary, positions, key).double().cpu()

    turned = rotate_reference(at(before)[:, None], deltas.cpu(), spec).squeeze(1)
    wanted = at(before + deltas)
    table = 0.0 if rotary.cos_sin_cache.dtype == torch.float32 else 2.0**-8
    error = float((turned - wanted).norm() / wanted.norm())
    return max(0.0, error - 2 * table)


def _rope(rotary: Any, positions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The module's own rotation of ``key`` ``(n, rotary_dim)`` in float32, from its cos/sin table."""
    table = rotary.cos_sin_cache[positions].float()
    cos, sin = table.chunk(2, dim=-1)
    band = key.float()
    if rotary.is_neox_style:
        first, second = band.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    first, second = band[:, 0::2], band[:, 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(1)


def _scaling(rotary: Any) -> str | None:
    name = type(rotary).__name__.removesuffix("RotaryEmbedding")
    return name or None
