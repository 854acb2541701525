from __future__ import annotations

from collections.abc import Iterator

import pytest

from leyline_client import _turn


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_turn, "FIRST_BACKOFF_S", 0.001)
    return
