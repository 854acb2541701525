"""Runs ``tests/ext/interpreted`` in a process where Triton interprets: it decides that at its import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton (its interpreter)")

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed (the `server` extra)")
def test_the_graft_has_the_oracles_values_on_the_triton_kernels() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(
        command, cwd=FOLDER.parents[2], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout, done.stdout
