from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_pools import DTYPES, TOLERANCE, bits, mha_pool, mla_pool, move, rope, splice_must_match
from torch.utils._python_dispatch import TorchDispatchMode

from leyline_server_ext.kernels import KVLayout, RopeSpec, reference, rotate_in_place, splice, torch_splice
from leyline_server_ext.kernels.torch_splice import CHUNK_BYTES

POOLS = {
    "mla": lambda slots, dtype: mla_pool(slots, dtype),
    "mla-halves": lambda slots, dtype: mla_pool(slots, dtype, 20, 12, [rope(12, False), None, rope(12, False, 5e5)]),
    "mha": lambda slots, dtype: mha_pool(slots, dtype),
    "mha-partial": lambda slots, dtype: mha_pool(slots, dtype, 3, 20, 7, [rope(12, True), None, rope(8, False)]),
}


def check_splice(layout: KVLayout, src: torch.Tensor, dst: torch.Tensor, delta: torch.Tensor | int) -> None:
    splice_must_match(layout, src, dst, delta, splice)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("rows", [1, 5, 123, 4097])
def test_splice_is_the_reference(pool: str, dtype: torch.dtype, rows: int) -> None:
    layout = POOLS[pool](2 * rows + 9, dtype)
    src, dst = move(layout.slots, rows)
    check_splice(layout, src, dst, -37)
    check_splice(layout, src, dst, (torch.arange(rows) * 3 // rows) * 1000 - 1000)
    check_splice(layout, src, dst, torch.arange(rows) - rows // 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("run", [20, 100, 3000])
def test_runs_of_consecutive_slots_are_moved_as_the_reference_does(
    pool: str, dtype: torch.dtype, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short ones are gathered, the long ones go through views, 3,000 rows in more than one chunk."""
    monkeypatch.setattr(torch_splice, "CHUNK_BYTES", 64 * 1024)
    rows = 6000
    layout = POOLS[pool](2 * rows, dtype)
    src = torch.arange(rows).view(-1, run).flip(0).flatten()
    dst = torch.arange(rows, 2 * rows)
    check_splice(layout, src, dst, -37)
    check_splice(layout, dst, src, torch.arange(rows) // 2000 * 100 - 100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_a_run_is_rotated_where_it_lies(pool: str, dtype: torch.dtype) -> None:
    layout = POOLS[pool](700, dtype)
    slots = torch.cat((torch.arange(300, 600), torch.arange(100, 250)))
    delta = torch.cat((torch.full((200,), 40), torch.zeros(150, dtype=torch.int64), torch.full((100,), -3)))
    expected = reference.splice(layout, slots, slots, delta)
    rotate_in_place(layout, slots, delta)
    for plane, want in zip(layout.planes, expected, strict=True):
        atol, rtol = TOLERANCE[dtype]
        torch.testing.assert_close(plane.buffer, want, atol=atol, rtol=rtol)
        assert torch.equal(bits(plane.buffer[slots[delta == 0]]), bits(want[slots[delta == 0]]))


def test_delta_zero_keeps_bits_that_arithmetic_would_not() -> None:
    layout = mha_pool(8, torch.bfloat16)
    for plane in layout.planes:
        plane.buffer[0] = -0.0
        plane.buffer[1] = float("inf")
        plane.buffer[2] = float("nan")
    src, dst = torch.arange(3), torch.arange(3) + 4
    for delta in (0, torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 0])):
        splice(layout, src, dst, delta)
        for plane in layout.planes:
            assert torch.equal(bits(plane.buffer[dst]), bits(plane.buffer[src]))


@pytest.mark.parametrize("pool", POOLS)
def test_a_slot_may_be_source_and_destination(pool: str) -> None:
    layout = POOLS[pool](3000, torch.float32)
    src = torch.arange(100, 2900)
    check_splice(layout, src, src - 100, -100)
    check_splice(layout, src, src.flip(0), torch.arange(2800) % 7)
    check_splice(layout, src, src, 5)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_in_place_is_splice_onto_itself(pool: str, dtype: torch.dtype) -> None:
    layout = POOLS[pool](700, dtype)
    slots, _ = move(700, 321)
    delta = torch.randint(-3, 4, (321,)) * 100
    expected = reference.splice(layout, slots, slots, delta)
    rotate_in_place(layout, slots, delta)
    for plane, want in zip(layout.planes, expected, strict=True):
        atol, rtol = TOLERANCE[dtype]
        torch.testing.assert_close(plane.buffer, want, atol=atol, rtol=rtol)
    assert any((delta == 0).tolist())


class _Counting(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(layout: KVLayout, rows: int, segments: int) -> dict[str, int]:
    """Torch operations of each kernel for ``rows`` rows with as many shifts as there are segments."""
    src, dst = move(layout.slots, rows)
    delta = torch.arange(rows) * segments // rows + 1
    found = {}
    with _Counting() as counting:
        splice(layout, src, dst, delta, disjoint=True)
    found["splice"] = counting.count
    with _Counting() as counting:
        rotate_in_place(layout, src, delta, distinct=True)
    found["rotate_in_place"] = counting.count
    return found


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("segments", [1, 5])
def test_the_number_of_operations_does_not_grow_with_the_rows(pool: str, segments: int) -> None:
    """The guard of the CPU's speed that no clock is needed for: a loop over tokens would show here."""
    layout = POOLS[pool](8192, torch.bfloat16)
    chunk = CHUNK_BYTES // max(plane.row_bytes for plane in layout.planes)
    few, many = segments * 40, min(4000, segments * (chunk - 1))
    assert many > 10 * few
    assert operations(layout, many, segments) == operations(layout, few, segments)


@pytest.mark.parametrize("pool", POOLS)
def test_a_shift_of_its_own_for_every_row_is_no_loop(pool: str) -> None:
    layout = POOLS[pool](4096, torch.bfloat16)
    assert operations(layout, 1500, 1500) == operations(layout, 150, 150)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("delta", [1, 127, 1024, 65536, 1_000_000, -1_000_000])
def test_angles_stay_exact_for_large_shifts(interleaved: bool, delta: int) -> None:
    ropes = [rope(64, interleaved)]
    layout = mha_pool(64, torch.float32, 2, 64, ropes=list(ropes))
    src, dst = move(64, 32)
    want = reference.splice(layout, src, dst, torch.full_like(src, delta))
    splice(layout, src, dst, delta)
    k = layout.planes[0].buffer
    error = (k.double() - want[0].double()).abs().max() / want[0].abs().max()
    assert float(error) < 2**-22


def test_bad_input_is_refused() -> None:
    layout = mla_pool(10, torch.float32)
    two = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="names a slot twice"):
        splice(layout, two, torch.tensor([3, 3]), 1)
    with pytest.raises(ValueError, match="outside"):
        splice(layout, torch.tensor([1, 10]), two, 1)
    with pytest.raises(ValueError, match="outside"):
        rotate_in_place(layout, torch.tensor([-1]), 1)
    with pytest.raises(ValueError, match="2 source slots but 1"):
        splice(layout, two, torch.tensor([3]), 1)
    with pytest.raises(ValueError, match="int64"):
        splice(layout, two.int(), two, 1)
    with pytest.raises(ValueError, match="delta"):
        splice(layout, two, two, torch.tensor([1.0, 2.0]))
    with pytest.raises(TypeError, match="delta"):
        splice(layout, two, two, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names a slot twice"):
        rotate_in_place(layout, torch.tensor([1, 1]), 1)


def test_bad_layouts_are_refused() -> None:
    x = torch.zeros(4, 1, 48)
    with pytest.raises(ValueError, match="band"):
        KVLayout.mla([x], [rope(8, True)], 32)
    with pytest.raises(ValueError, match="rotary columns"):
        KVLayout.mha([x], [x], [rope(64, True)])
    with pytest.raises(ValueError, match="buffers but"):
        KVLayout.mha([x], [x], [])
    with pytest.raises(ValueError, match="cannot rotate"):
        KVLayout.mla([x.to(torch.float8_e4m3fn)], [rope(16, True)], 32)
    with pytest.raises(ValueError, match="next to each other"):
        KVLayout.mha([torch.zeros(4, 96, 2).mT], [torch.zeros(4, 2, 96)], [rope(16, True)])
    with pytest.raises(ValueError, match="inv_freq"):
        RopeSpec(torch.ones(3), 8, True)
    with pytest.raises(ValueError, match="even"):
        RopeSpec(torch.ones(3), 7, True)


def test_bytes_per_token() -> None:
    assert mla_pool(4, torch.bfloat16, 512, 64, [rope(64, True)] * 27).bytes_per_token == 27 * 576 * 2
    layout = mha_pool(4, torch.bfloat16, 8, 128, ropes=[rope(128, False)] * 32)
    assert (layout.bytes_per_token, layout.rotary_bytes_per_token) == (32 * 2 * 8 * 128 * 2, 32 * 8 * 128 * 2)
