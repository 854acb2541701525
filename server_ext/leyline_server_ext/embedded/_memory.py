"""How much memory the embedded server is going to need, and how much there is."""

import json
from pathlib import Path

from leyline_server_ext.embedded.errors import MemoryShortError

_PROCESSES_BYTES = int(1.5 * 2**30)
"""Interpreter, torch and SGLang in the three processes, measured as proportional set size without weights and KV."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check(model: Path, dtype: str, max_total_tokens: int) -> None:
    """Refuse to start into the out-of-memory killer.

    Args:
        model: model folder with ``config.json`` and safetensors.
        dtype: of weights and KV cache, one of float32, bfloat16, float16.
        max_total_tokens: size of the KV pool.

    Raises:
        MemoryShortError: the estimate exceeds what the machine, or its control group, has available.
    """
    needed = _PROCESSES_BYTES + weights_bytes(model, dtype) + kv_bytes(model, dtype, max_total_tokens)
    available = available_bytes()
    if needed > available:
        raise MemoryShortError(
            f"the embedded server needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available: "
            "close something, or ask for fewer tokens with --max-total-tokens"
        )


def weights_bytes(model: Path, dtype: str) -> int:
    """Bytes of the weights in memory; the files hold two bytes per parameter."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) * _DTYPE_BYTES[dtype] // 2


def kv_bytes(model: Path, dtype: str, tokens: int) -> int:
    """Bytes of the KV pool, from the shapes in ``config.json``."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if "kv_lora_rank" in config:
        row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        row = 2 * head_dim * config.get("num_key_value_heads", heads)
    return tokens * int(config["num_hidden_layers"]) * int(row) * _DTYPE_BYTES[dtype]


def available_bytes() -> int:
    """The kernel's estimate of memory that can be had without swapping, bounded by the control group's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - used)
