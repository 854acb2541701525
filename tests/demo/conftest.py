from __future__ import annotations

import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture(autouse=True)
def demo_path(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's folder, first on the path as when its script is run."""
    monkeypatch.syspath_prepend(str(DEMO))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    return DEMO
