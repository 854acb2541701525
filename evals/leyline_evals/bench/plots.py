"""The benchmark's pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyline_evals.plotting import COLOURS, figure

from .turns import ARMS

_NAMES = {
    "append": "append",
    "splice": "splice\n(deletion)",
    "splice_stub": "splice\n(ten-token stub)",
    "reprefill": "re-prefill",
}


def draw_ttft(result: dict[str, Any], path: Path) -> None:
    """Medians as bars and every sample as a dot; the re-prefill on a scale of its own."""
    with figure(path, 1, 2, size=(9.0, 4.0), width_ratios=[3, 2]) as (drawn, axes):
        shape = result["shape"]
        title = "Time to first token: {context:,} tokens cached, {evicted} evicted at {position}".format(**shape)
        drawn.suptitle(title, fontsize=12, x=0.01, ha="left")
        _bars(axes[0], result, ARMS[:3])
        axes[0].set_title("Turns that reuse the cache, ms")
        _bars(axes[1], result, ("splice", "reprefill"))
        axes[1].set_title("Against prefilling again, ms")


def _bars(axis: Any, result: dict[str, Any], arms: Sequence[str]) -> None:
    base = result[f"{arms[0]}_ms"]
    top = 0.0
    for place, arm in enumerate(arms):
        middle = result[f"{arm}_ms"]
        dots = [sample["ms"] for sample in result["samples"] if sample["arm"] == arm]
        axis.bar(place, middle, 0.62, color=COLOURS[arm])
        spread = [place + 0.3 * (number / max(1, len(dots) - 1) - 0.5) for number in range(len(dots))]
        axis.scatter(spread, dots, s=16, color="white", edgecolor="#111827", linewidth=0.8, zorder=3)
        highest = max(middle, *dots)
        top = max(top, highest)
        factor = "" if arm == arms[0] else f"   {middle / base:.2f}×"
        axis.annotate(f"{middle:,.0f} ms{factor}", (place, highest), (0, 5), textcoords="offset points", ha="center")
    axis.set_xticks(range(len(arms)), [_NAMES[arm] for arm in arms])
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(0, top * 1.15)


def draw_sweep(result: dict[str, Any], path: Path) -> None:
    """Turn times and their ratio over context length, graft time over moved tokens."""
    points = result["points"]
    lengths = [point["context_tokens"] for point in points]
    with figure(path, 1, 3, size=(12.0, 3.8)) as (_, axes):
        for arm in ("append", "splice"):
            axes[0].plot(lengths, [point[f"{arm}_ms"] for point in points], "o-", color=COLOURS[arm], label=arm)
        axes[0].set_title("Time to first token, ms")
        axes[1].plot(lengths, [point["splice_over_append"] for point in points], "o-", color=COLOURS["splice"])
        axes[1].axhline(1.0, color=COLOURS["append"], linewidth=1)
        axes[1].set_title("Splice over append")
        for axis in axes[:2]:
            axis.set_xlabel("context tokens")
        _graft_lines(axes[2], points, result.get("graft", {}))
        for axis in (axes[0], axes[2]):
            axis.set_ylim(bottom=0)
            axis.legend()


def _graft_lines(axis: Any, points: Sequence[dict[str, Any]], graft: dict[str, Any]) -> None:
    moved = [point["moved_tokens"] for point in points]
    names = {"in_place": ("rotated in place", "splice"), "copy": ("copied and rotated", "splice_stub")}
    for kind, (label, colour) in names.items():
        axis.plot(moved, [point[f"graft_{kind}_ms"] for point in points], "o-", color=COLOURS[colour], label=label)
        if kind in graft:
            plain = graft[kind]["plain_copy_ms"]
            axis.plot(moved, plain, ":", color=COLOURS[colour], label=f"plain copy of as many bytes ({label})")
    axis.set_title("Graft, ms")
    axis.set_xlabel("tokens moved")
