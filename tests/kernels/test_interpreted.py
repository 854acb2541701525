from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton (its interpreter)")

FOLDER = Path(__file__).parent / "interpreted"


def run_interpreted(name: str, matrix: str, timeout: float) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "LEYLINE_KERNEL_MATRIX": matrix, "OMP_NUM_THREADS": "1"}
    root = FOLDER.parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert "skipped" not in done.stdout, done.stdout


NAMES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_in_the_interpreter(name: str) -> None:
    run_interpreted(name, "covering", timeout=1400)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif("LEYLINE_KERNEL_MATRIX" not in os.environ, reason="set LEYLINE_KERNEL_MATRIX=complete (slow)")
@pytest.mark.parametrize("name", NAMES)
def test_complete_matrix_in_the_interpreter(name: str) -> None:
    run_interpreted(name, "complete", timeout=7000)
