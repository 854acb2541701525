"""Over context lengths: is the splice turn's price next to an append flat, and is the graft linear in what it moves?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from leyline_client import LeylineClient

from .copying import copy_ms
from .server import flush, say
from .standing import KINDS, Standing
from .turns import Sample, Shape

LENGTHS = (2_000, 3_000, 4_000, 5_000, 6_000, 7_500)
FLAT_WITHIN = 0.10
BANDWIDTH_GOAL = 0.5


def sweep(client: LeylineClient, rounds: int, vocabulary: int, model: Path | None) -> dict[str, Any]:
    """Time append and splice (in place, and copying) at every length.

    ``model`` is the served model's folder; without it the bytes moved are not known and no copy is timed.
    """
    points = []
    for context in LENGTHS:
        samples = _at(client, Shape(context=context), rounds, vocabulary)
        points.append(_point(context, samples))
        say(f"  {context:,} tokens: splice_over_append {points[-1]['splice_over_append']:.3f}")
    result: dict[str, Any] = {"points": points, **_flatness([point["splice_over_append"] for point in points])}
    if model is not None:
        result["graft"] = _graft_against_copy(points, model, client)
    return result


def report(result: dict[str, Any]) -> str:
    """The sweep's figures next to their goals."""
    met = "met" if result["spread"] <= FLAT_WITHIN else "not met"
    lines = [f"  splice_over_append flat to ±{100 * result['spread']:.0f} %   goal ±{100 * FLAT_WITHIN:.0f} %: {met}"]
    for kind, graft in result.get("graft", {}).items():
        ratio, shares = graft["bandwidth_over_copy"], graft["bandwidths_over_copy"]
        met = "met" if ratio >= BANDWIDTH_GOAL else "not met"
        lines.append(
            f"  graft {kind}: {graft['ms_per_1000_tokens']:.2f} ms per 1,000 tokens moved (r² {graft['r2']:.3f}); "
            f"bandwidth {ratio:.2f} of a plain copy's, from {shares[0]:.2f} to {shares[-1]:.2f} with the length   "
            f"goal >= {BANDWIDTH_GOAL}: {met}"
        )
    return "\n".join(lines)


def _at(client: LeylineClient, shape: Shape, rounds: int, vocabulary: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {kind: [] for kind in KINDS}
    flush(client)
    standing = Standing(client, shape, seed=shape.context, vocabulary=vocabulary)
    try:
        for number in range(-1, rounds):  # the first round is not counted
            shift = number % len(KINDS)
            for kind in (*KINDS[shift:], *KINDS[:shift]):
                sample = standing.take(kind)
                if number >= 0:
                    samples[kind].append(sample)
    finally:
        standing.close()
    return samples


def _point(context: int, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    ms = {kind: median(sample.ms for sample in taken) for kind, taken in samples.items()}
    graft = {kind: median(s.receipt.graft_ms for s in samples[kind]) for kind in ("splice", "splice_copy")}
    return {
        "context_tokens": context,
        "moved_tokens": samples["splice"][0].receipt.rotated_tokens,
        **{f"{kind}_ms": round(value, 2) for kind, value in ms.items()},
        "splice_over_append": round(ms["splice"] / ms["append"], 4),
        "graft_in_place_ms": round(graft["splice"], 3),
        "graft_copy_ms": round(graft["splice_copy"], 3),
        "samples": {kind: [round(sample.ms, 2) for sample in taken] for kind, taken in samples.items()},
    }


def _flatness(ratios: Sequence[float]) -> dict[str, float]:
    middle = (min(ratios) + max(ratios)) / 2
    return {"spread": round(max(ratios) / middle - 1, 4)}


def _graft_against_copy(points: Sequence[dict[str, Any]], model: Path, client: LeylineClient) -> dict[str, Any]:
    """Graft time by moved tokens, and its bandwidth as a share of a plain copy's of as many bytes.

    In place only the rotary band of K is read and written, so that many bytes count; a copy moves whole rows.
    """
    key_bytes, row_bytes = row_sizes(json.loads((model / "config.json").read_text()), client.info().kv_dtype)
    result = {}
    for kind, size in (("in_place", key_bytes), ("copy", row_bytes)):
        moved = [point["moved_tokens"] for point in points]
        taken = [point[f"graft_{kind}_ms"] for point in points]
        plain = copy_ms([tokens * size for tokens in moved])
        slope, r2 = _line(moved, taken)
        shares = [copied / grafted for copied, grafted in zip(plain, taken, strict=True)]
        result[kind] = {
            "bytes_per_token": size,
            "ms": taken,
            "plain_copy_ms": [round(value, 3) for value in plain],
            "ms_per_1000_tokens": round(1000 * slope, 4),
            "r2": round(r2, 5),
            "bandwidth_over_copy": round(median(shares), 4),
            "bandwidths_over_copy": [round(share, 4) for share in shares],
        }
    return result


def row_sizes(config: dict[str, Any], kv_dtype: str) -> tuple[int, int]:
    """Bytes per token of the rotated band and of whole rows, over all layers, from a model's ``config.json``."""
    item = {"float32": 4, "bfloat16": 2, "float16": 2}[kv_dtype.removeprefix("torch.")]
    layers = int(config["num_hidden_layers"])
    if "kv_lora_rank" in config:
        rope = int(config["qk_rope_head_dim"])
        return layers * rope * item, layers * (int(config["kv_lora_rank"]) + rope) * item
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return layers * heads * width * item, 2 * layers * heads * width * item


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and r² of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    xx = sum((a - mean_x) ** 2 for a in x)
    yy = sum((b - mean_y) ** 2 for b in y)
    xy = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return xy / xx, xy * xy / (xx * yy) if yy else 1.0
