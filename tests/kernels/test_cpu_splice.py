from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from kernel_pools import DTYPES, TOLERANCE, bits, mha_pool, mla_pool, move, rope, splice_must_match

from leyline_server_ext.kernels import (
    KVLayout,
    RopeSpec,
    cpu_loops,
    cpu_splice,
    prepare,
    reference,
    rotate_in_place,
    splice,
)

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


@pytest.mark.parametrize("rows", [1, 200, 203])
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_share_the_blocks(threads: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread waits for another to be in the loop as well: all take part, where there are blocks for so many."""
    monkeypatch.setattr(cpu_splice, "BLOCK_BYTES", 10 * 64 * 2)  # ten rows
    layout = mha_pool(500, torch.bfloat16)
    parties = min(threads, -(-rows // 10) * len(layout.planes), 1 + (os.cpu_count() or 1))
    torch.set_num_threads(parties)
    together, taking_part = threading.Barrier(parties, timeout=20), set()
    row_mover = cpu_splice.row_mover

    def meeting(*what: Any) -> Any:
        def mover(*arguments: Any) -> None:
            together.wait()
            taking_part.add(threading.get_ident())
            row_mover(*what)(*arguments)

        return mover

    monkeypatch.setattr(cpu_splice, "row_mover", meeting)
    src, dst = move(500, rows)
    check_splice(layout, src, dst, torch.arange(rows) // 50 - 1)
    assert len(taking_part) == parties


def test_a_thread_that_does_not_wake_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu_splice, "BLOCK_BYTES", 1)
    busy = ThreadPoolExecutor(1)
    release = threading.Event()
    busy.submit(release.wait)
    monkeypatch.setattr(cpu_splice, "_threads", lambda: busy)
    layout = mha_pool(100, torch.bfloat16)
    check_splice(layout, *move(100, 50), 7)
    release.set()
    busy.shutdown()


def test_a_fault_is_raised_when_all_threads_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_splice, "BLOCK_BYTES", 1)
    torch.set_num_threads(2)
    started, ended = threading.Event(), []

    def faulty(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert started.wait(20)
            raise RuntimeError("here")
        started.set()
        time.sleep(0.05)
        ended.append(True)

    monkeypatch.setattr(cpu_splice, "row_mover", lambda *_: faulty)
    with pytest.raises(RuntimeError, match="here"):
        splice(mha_pool(50, torch.float32), *move(50, 20), 1)
    assert ended


def test_a_fault_in_another_thread_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_splice, "BLOCK_BYTES", 1)
    torch.set_num_threads(2)
    started = threading.Event()

    def faulty(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert started.wait(20)
            return
        started.set()
        raise RuntimeError("there")

    monkeypatch.setattr(cpu_splice, "row_mover", lambda *_: faulty)
    with pytest.raises(RuntimeError, match="there"):
        splice(mha_pool(50, torch.float32), *move(50, 20), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_may_lie_apart(dtype: torch.dtype) -> None:
    """K and V of a slot side by side in one tensor: the rows of a plane do not follow on each other."""
    both = torch.randn(60, 2, 2, 16).to(dtype)
    layout = KVLayout.mha([both[:, 0]], [both[:, 1]], [rope(16, False)])
    src, dst = move(60, 25)
    check_splice(layout, src, dst, -9)
    check_splice(layout, src, src.flip(0), torch.arange(25))


FLOATS = torch.cat(
    [
        torch.randint(0, 2**32, (200_000,), generator=torch.Generator().manual_seed(1)).to(torch.uint32),
        # Near the exponents where a float16 becomes subnormal, zero or infinite.
        torch.cat(
            [(torch.tensor(e) << 23) + torch.randint(0, 2**23, (5_000,)) for e in (101, 102, 103, 112, 113, 142, 143)]
        ).to(torch.uint32),
        torch.tensor([0, 2**31, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x477FF000, 0x477FEFFF, 0x7F7FFFFF]).to(
            torch.uint32
        ),
    ]
).view(torch.float32)


def turn_one(row: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """One head as wide as there are numbers to look at, turned by any factors at all."""
    size, zero, where = len(row), np.zeros(1, np.int64), np.array([row.data_ptr()])
    factors = (cos.view(1, 1, -1).numpy(), sin.view(1, 1, -1).numpy())
    loop = cpu_loops.row_mover(row.dtype, size // 2, False, False)
    loop(
        np.zeros(1, np.int64),
        1,
        zero,
        zero,
        zero,
        where,
        size,
        where,
        size,
        np.zeros(1, np.int32),
        1,
        size,
        0,
        *factors,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    """One times a cosine, minus zero: what is stored is the cosine, rounded. A sine of zero leaves the other half."""
    half = len(FLOATS)
    row = torch.cat((torch.ones(half), torch.zeros(half))).to(dtype)
    turn_one(row, FLOATS, torch.zeros(half))
    want = FLOATS.to(dtype)
    same = (bits(row[:half]) == bits(want)) | (row[:half].isnan() & want.isnan())
    assert bool(same.all()), FLOATS[~same][:5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    """Turned by nothing, every number is what it was."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    row = torch.cat((every, torch.zeros_like(every)))
    turn_one(row, torch.ones(2**16), torch.zeros(2**16))
    same = (bits(row[: 2**16]) == bits(every)) | (row[: 2**16].isnan() & every.isnan())
    assert bool(same.all()), every[~same][:5]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_prepare_compiles_all_there_is_and_keeps_every_bit(
    pool: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_loops.row_mover.cache_clear()
    layout = POOLS[pool](40, dtype)
    before = [plane.buffer.clone() for plane in layout.planes]
    prepare(layout)
    for plane, old in zip(layout.planes, before, strict=True):
        assert torch.equal(bits(plane.buffer), bits(old))
    compiled = []
    original = cpu_loops._compiled
    monkeypatch.setattr(cpu_loops, "_compiled", lambda function: compiled.append(function) or original(function))
    src, dst = move(40, 15)
    check_splice(layout, src, dst, torch.arange(15))
    rotate_in_place(layout, src, 3)
    assert not compiled


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
