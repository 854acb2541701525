from __future__ import annotations

import pytest
import torch

from leyline_evals import bench_gpu


def test_the_checks_pass_on_right_kernels_and_find_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "DTYPES", (torch.bfloat16,))
    monkeypatch.setitem(bench_gpu.QUERY_HEADS, "llama-3-8b", 8)
    monkeypatch.setitem(bench_gpu.QUERY_HEADS, "deepseek-v2-lite", 1)
    assert bench_gpu.check("cpu", rows=560) == []

    monkeypatch.setattr(bench_gpu, "splice", lambda layout, src, dst, delta: None)
    monkeypatch.setattr(bench_gpu, "rotate_in_place", lambda layout, slots, delta: None)
    monkeypatch.setattr(bench_gpu, "segment_attention", lambda layout, layer, query, *a, **k: query[..., :128] * 0)
    monkeypatch.delitem(bench_gpu.POOLS, "deepseek-v2-lite")
    wrong = bench_gpu.check("cpu", rows=560)
    kernels = {"overlapping", "rotate_in_place", "segment_attention", "splice"}
    assert {line.split()[0] for line in wrong} == kernels
    assert len(wrong) == 2 * 2 + 1 + 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_card_nothing_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_the_card() -> None:
    assert bench_gpu.check("cuda") == []
