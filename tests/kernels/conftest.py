from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels need torch")
import torch

# The helpers beside the tests; importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seeded_and_single_threaded() -> Iterator[None]:
    """Small tensors: a second thread only waits for a busy core."""
    threads = torch.get_num_threads()
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
