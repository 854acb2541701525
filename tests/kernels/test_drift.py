from __future__ import annotations

import pytest
import torch

from leyline_evals import drift, drift_models


def test_a_bfloat16_chain_drifts_and_rotate_once_does_not() -> None:
    key = torch.randn(64, drift.HEADS, drift.HEAD_DIM).bfloat16()
    once = drift.measure(key, drift.by_kernel(key, 100 * drift.STEP), 100 * drift.STEP)
    chained = drift.measure(key, drift.chain(key, drift.by_kernel, 100), 100 * drift.STEP)
    # One rounding to 8 bits: uniform within half a unit, 2**-8 / sqrt(3) of the value at most, half that at least.
    assert 2**-9 / 3**0.5 < once["relative_l2"] < 2**-8 / 3**0.5
    # Independent roundings would give the square root of 100; pairs that turn by less than half a unit do not move at
    # all, so it is more, but never the 100 of errors all the same way.
    assert 10 < chained["relative_l2"] / once["relative_l2"] < 50
    naive = drift.measure(key, drift.in_bfloat16(key, drift.STEP), drift.STEP)
    assert naive["relative_l2"] > 1.5 * once["relative_l2"]


@pytest.mark.parametrize("n", [1, 2, 10, 101])
def test_chains_close_the_same_gap(n: int) -> None:
    steps = drift_models._steps(n)
    assert len(steps) == n
    assert sum(steps) == -drift_models.SPAN


def test_first_tokens_of_tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setattr(drift_models, "PROMPTS", 3)
    rows = drift_models.first_tokens([1, 20], {"fp32": torch.float32, "bf16": torch.bfloat16})
    by = {(r.model, r.storage, r.rotations, r.chained): r for r in rows}
    assert len(by) == len(rows) == 2 * 2 * 3
    for model in ("mla", "gqa"):
        assert by[model, "fp32", 1, False].agreeing == 3
        assert by[model, "fp32", 1, False].logit_relative_l2 < 1e-5
        assert by[model, "bf16", 20, True].logit_relative_l2 > by[model, "bf16", 1, False].logit_relative_l2 > 1e-5
