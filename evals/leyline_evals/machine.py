"""Facts about where a measurement was taken: they go into every file of results, since figures mean little without."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leyline_client import __version__

_PACKAGES = ("sglang", "torch", "transformers", "triton", "numpy")


def machine_facts() -> dict[str, Any]:
    """CPU, cores, load average and versions, as JSON values. Nothing that names the machine or its user."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "leyline": __version__,
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` whole or not at all; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
