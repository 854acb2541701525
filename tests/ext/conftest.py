"""Unit tests of the planner run everywhere; those that drive the engine's cache need SGLang."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def _stand_in() -> Path | None:
    """Folder of the module that SGLang imports on a machine without a GPU."""
    root = importlib.util.find_spec("leyline_server_ext")
    assert root is not None
    assert root.submodule_search_locations is not None
    found = Path(root.submodule_search_locations[0]) / "embedded" / "stand_in"
    return found if found.is_dir() else None


@pytest.fixture(scope="session")
def engine() -> None:
    """SGLang's scheduler side, imported once; a test that needs it is skipped with a reason where it is missing."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed (the `server` extra)")
    if importlib.util.find_spec("sgl_kernel") is None:
        folder = _stand_in()
        if folder is None:
            pytest.skip("neither sgl_kernel nor its stand-in is there")
        sys.path.append(str(folder))
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kv_world import prepare

        prepare()
