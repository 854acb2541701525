"""The demo's table: three rows per turn, printed as they happen."""

from __future__ import annotations

from bugfix.agent import Row
from bugfix.script import Step

_COLUMNS = ("prompt", "cached", "rotated", "prefilled", "edits", "TTFT ms")
_RULE = "─" * 82


def header() -> str:
    """Column titles and what they count."""
    titles = "".join(f"{title:>11}" for title in _COLUMNS)
    return f"{'turn':<5}{'arm':<10}{titles}\n{_RULE}"


def turn_title(number: int, count: int, step: Step) -> str:
    """What all arms do in this turn, the ``number``-th of ``count``."""
    return f"{f'{number}/{count}':<7}{step}"


def arm_row(arm: str, row: Row) -> str:
    """One arm's counts of the turn; zeros are dots, so that the eye finds what happened."""
    counts = (row.prompt_tokens, row.cached_tokens, row.rotated_tokens, row.prefilled_tokens, row.edits)
    cells = "".join(f"{count:>11,}" if count else f"{'·':>11}" for count in counts)
    return f"{'':<5}{arm:<10}{cells}{row.ttft_ms:>11,.0f}"


def said_line(text: str, width: int = 74) -> str:
    """What the model said, on one line."""
    line = " ".join(text.split())
    return f"{'':<5}“{line if len(line) <= width else line[: width - 1] + '…'}”"
