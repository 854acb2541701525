"""What all plots of this project share: a backend that needs no display, one palette, one look, files written whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLOURS = {
    "keep-all": "#6b7280",
    "append": "#6b7280",
    "forget": "#d97706",
    "reprefill": "#d97706",
    "amortize": "#0f766e",
    "splice": "#0f766e",
    "splice_stub": "#5eb5ac",
    "copy": "#6b7280",
}
"""One colour per arm in every plot; told apart also in grey and by the colour-blind."""

_LOOK = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "font.size": 9.5,
    "legend.frameon": False,
    "figure.dpi": 140,
}


@contextmanager
def figure(path: Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float], **layout: Any) -> Iterator[Any]:
    """A figure and its axes, as ``(figure, axes)``; written to ``path`` (PNG) when the block ends well.

    ``size`` is in inches, ``layout`` goes to matplotlib's ``subplots``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_LOOK):
        drawn, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", **layout)
        try:
            yield drawn, axes
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.part")
            drawn.savefig(aside, format="png")
            aside.replace(path)
        finally:
            pyplot.close(drawn)
