"""The demo's picture: what each turn's prompt was, how much of it had to be computed, and how long that took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bugfix.summary import Arms, edited_turns
from leyline_evals.plotting import COLOURS, figure

_BAR = 0.26
_MARKERS = {"keep-all": "o", "forget": "s", "amortize": "D"}


def draw(arms: Arms, path: Path) -> None:
    """Write the PNG. Raises ImportError where matplotlib is missing."""
    edited = edited_turns(arms)
    turns = [row.turn for row in next(iter(arms.values()))]
    with figure(path, 3, size=(9.0, 9.0), sharex=True) as (drawn, axes):
        drawn.suptitle("An agent fixes a small program: the same turns in three arms", fontsize=13, x=0.01, ha="left")
        _lines(axes[0], arms)
        axes[0].set_title("Prompt tokens")
        axes[0].legend(loc="upper left")
        _bars(axes[1], arms, "prefilled_tokens")
        axes[1].set_title("Prompt tokens computed (prefilled): the rest came from the cache")
        _bars(axes[2], arms, "ttft_ms")
        axes[2].set_title("Time to first token, ms")
        axes[2].set_xlabel("turn (shaded: policies edited the history)")
        axes[2].set_xticks(turns)
        for one in axes:
            for turn in edited:
                one.axvspan(turn - 0.5, turn + 0.5, color="#f3f4f6", zorder=0)
            one.set_xlim(turns[0] - 0.6, turns[-1] + 0.6)
            one.set_ylim(bottom=0)
            one.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _lines(axis: Any, arms: Arms) -> None:
    for name, rows in arms.items():
        axis.plot(
            [row.turn for row in rows],
            [row.prompt_tokens for row in rows],
            color=COLOURS[name],
            marker=_MARKERS[name],
            markersize=7 if name == "forget" else 4.5,
            # The editing arms' prompts have the same length but for what the model said: the wider line shows under.
            linewidth=4 if name == "forget" else 1.8,
            label=name,
        )


def _bars(axis: Any, arms: Arms, what: str) -> None:
    for number, (name, rows) in enumerate(arms.items()):
        places = [row.turn + (number - (len(arms) - 1) / 2) * _BAR for row in rows]
        axis.bar(places, [getattr(row, what) for row in rows], _BAR * 0.92, color=COLOURS[name], label=name)
