from __future__ import annotations

import itertools
import os

import pytest
import torch
from kernel_pools import DTYPES, TOLERANCE, bits, mha_pool, mla_pool, move, rope, snapshot, splice_must_match

from leyline_server_ext.kernels import KVLayout, reference, triton_splice

COMPLETE = os.environ.get("LEYLINE_KERNEL_MATRIX") == "complete"
ROWS = [1, 5, 123, 4097]
# One layer each; layers of different kinds have their own test. 576 is DeepSeek's row: latent 512, band 64.
POOLS = {
    "mla-576": lambda n, t: mla_pool(n, t, 512, 64, [rope(64, True)]),
    "mla-64-halves": lambda n, t: mla_pool(n, t, 48, 16, [rope(16, False)]),
    "gqa-64": lambda n, t: mha_pool(n, t, 3, 64, ropes=[rope(64, False)]),
    "gqa-96": lambda n, t: mha_pool(n, t, 2, 96, ropes=[rope(96, False)]),
    "gqa-96-partial": lambda n, t: mha_pool(n, t, 2, 96, 64, ropes=[rope(24, False)]),
    "gqa-128": lambda n, t: mha_pool(n, t, 2, 128, ropes=[rope(128, False)]),
    "gqa-128-partial-pairs": lambda n, t: mha_pool(n, t, 1, 128, ropes=[rope(64, True)]),
}
KINDS = ["one", "segments"]


def matrix() -> list[tuple[str, torch.dtype, int, str]]:
    if COMPLETE:
        return list(itertools.product(POOLS, DTYPES, ROWS, KINDS))
    cases = []
    for i, pool in enumerate(POOLS):
        for j, dtype in enumerate(DTYPES):
            cases.append((pool, dtype, ROWS[(i + j) % 3], KINDS[(i + j) % 2]))
    return [*cases, ("mla-64-halves", torch.bfloat16, 4097, "segments"), ("gqa-64", torch.float16, 4097, "one")]


def shifts(rows: int, kind: str) -> torch.Tensor | int:
    return -37 if kind == "one" else (torch.arange(rows) * 3 // rows) * 1000 - 1000


def by_triton(layout: KVLayout, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor | int) -> None:
    triton_splice.splice(layout, src, dst, delta, staged=False)


@pytest.mark.parametrize(("pool", "dtype", "rows", "kind"), matrix())
def test_splice(pool: str, dtype: torch.dtype, rows: int, kind: str) -> None:
    layout = POOLS[pool](2 * rows + 3, dtype)
    src, dst = move(layout.slots, rows)
    splice_must_match(layout, src, dst, shifts(rows, kind), by_triton)


@pytest.mark.parametrize(("pool", "dtype", "rows", "kind"), matrix())
def test_rotate_in_place(pool: str, dtype: torch.dtype, rows: int, kind: str) -> None:
    layout = POOLS[pool](rows + 7, dtype)
    slots = torch.randperm(layout.slots)[:rows]
    delta = shifts(rows, kind)
    full = torch.full_like(slots, delta) if isinstance(delta, int) else delta
    want, before = reference.splice(layout, slots, slots, full), snapshot(layout)
    triton_splice.rotate_in_place(layout, slots, delta)
    for plane, after, old in zip(layout.planes, want, before, strict=True):
        atol, rtol = TOLERANCE[dtype]
        torch.testing.assert_close(plane.buffer, after, atol=atol, rtol=rtol)
        same = torch.ones(old.shape, dtype=torch.bool)
        if plane.rope_index >= 0:
            width = layout.ropes[plane.rope_index].rotary_dim
            same[slots[full != 0], :, plane.rot_start : plane.rot_start + width] = False
        assert torch.equal(bits(plane.buffer)[same], bits(old)[same])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_of_different_kinds_in_one_pool(dtype: torch.dtype) -> None:
    ropes = [rope(32, False), None, rope(32, False, 5e5), rope(16, True), None]
    layout = mha_pool(150, dtype, 3, 32, 20, ropes=ropes)
    src, dst = move(150, 70)
    splice_must_match(layout, src, dst, shifts(70, "segments"), by_triton)
    splice_must_match(layout, src, dst, 900, by_triton)
    splice_must_match(layout, src, dst, 0, by_triton)


@pytest.mark.parametrize("pool", ["mla-64-halves", "gqa-64"])
def test_staged_splice_may_overlap(pool: str) -> None:
    def staged(layout: KVLayout, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor | int) -> None:
        triton_splice.splice(layout, src, dst, delta, staged=True)

    layout = POOLS[pool](400, torch.bfloat16)
    src = torch.arange(50, 390)
    splice_must_match(layout, src, src - 50, -50, staged)
    splice_must_match(layout, src, src.flip(0), torch.arange(340) % 5, staged)


@pytest.mark.parametrize("pool", POOLS)
def test_prepare_launches_every_variant_and_keeps_every_bit(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = POOLS[pool](9, torch.bfloat16)
    before = snapshot(layout)
    variants = []
    constants = triton_splice.constants

    def noted(*args: object, **kwargs: object) -> dict[str, object]:
        variants.append((kwargs["band_only"], kwargs["per_row"]))
        return constants(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_splice, "constants", noted)
    triton_splice.prepare(layout)
    assert sorted(set(variants)) == list(itertools.product((False, True), repeat=2))
    for plane, old in zip(layout.planes, before, strict=True):
        assert torch.equal(bits(plane.buffer), bits(old))


def test_unaligned_views_and_padded_slots() -> None:
    storage = torch.randn(60 * 200 + 1).bfloat16()
    k = storage[1:].view(60, 200)[:, :96].unflatten(1, (3, 32))
    v = torch.randn(60, 3, 32).bfloat16()
    layout = KVLayout.mha([k], [v], [rope(32, False)])
    src, dst = move(60, 20)
    splice_must_match(layout, src, dst, 11, by_triton)


@pytest.mark.parametrize("interleaved", [True, False])
def test_angles_stay_exact_for_large_shifts(interleaved: bool) -> None:
    for delta in (1, 127, 1024, 65536, 1_000_000, -1_000_000, 2**40 + 12345):
        layout = mha_pool(12, torch.float32, 1, 64, ropes=[rope(64, interleaved)])
        src, dst = move(12, 6)
        want = reference.splice(layout, src, dst, torch.full_like(src, delta))[0]
        by_triton(layout, src, dst, delta)
        error = (layout.planes[0].buffer.double() - want.double()).abs().max() / want.abs().max()
        # Four float32 roundings; past 2**32 positions the float64 oracle itself is off by delta * 2**-53.
        assert float(error) < 2**-22 + abs(delta) * 2**-53
