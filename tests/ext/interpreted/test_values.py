"""The graft on SGLang's own cache and pools with the Triton kernels behind the door, row by row against the oracle."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch

from leyline_client._models import Directive, Executed

pytestmark = pytest.mark.usefixtures("engine")

TEXT = [1 + (i * i * 7 + i // 3) % 5 for i in range(110)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Launches of each Triton kernel; the CPU path fails the test."""
    from leyline_server_ext.kernels import cpu_splice

    # Triton's interpreter is on: this is the module that the door opens to, as on CUDA.
    triton_splice = importlib.import_module("leyline_server_ext.kernels.triton_splice")
    count = {"splice": 0, "rotate_in_place": 0}

    def counting(*args: Any, name: str, kernel: Any, **kwargs: Any) -> None:
        count[name] += 1
        kernel(*args, **kwargs)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the CPU path")

    for name in count:
        monkeypatch.setattr(triton_splice, name, partial(counting, name=name, kernel=getattr(triton_splice, name)))
        monkeypatch.setattr(cpu_splice, name, never)
    return count


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(("kind", "dtype"), [("mla", torch.bfloat16), ("mha", torch.float32)], ids=str)
def test_an_edited_conversation_has_the_values_of_the_oracle(
    page: int, kind: str, dtype: torch.dtype, launched: dict[str, int]
):
    """In-place turns, copies with several shifts at once, one on top of the other; `Office` compares every row."""
    from conversations import Office
    from kv_world import World

    here = Office(World(page=page, kind=kind, core="rust", tokens=960, dtype=dtype))
    talk = here.open(None)
    here.edit(talk, [], TEXT)
    steps = [
        ([Directive(start=page, end=2 * page)], False),
        ([Directive(start=10, end=15, replacement=(9,) * 3), Directive(start=40, end=51)], True),
    ]
    for directives, keep in steps:
        receipt = here.edit(talk, directives, [3, 3], keep=keep).receipt
        assert (receipt.executed, receipt.reason) == (Executed.AMORTIZE, None)
        assert receipt.rotated_tokens > 0
        here.world.check()
    assert launched["splice"] > 0
    assert launched["rotate_in_place"] > 0
