"""What a finished run shows, in plain words, from its own figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bugfix.agent import Row

Arms = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Totals:
    """An arm over all its turns, and over those in which the editing arms edited."""

    last_prompt: int
    prompt: int
    prefilled: int
    rotated: int
    edits: int
    edited_prefill: int
    """Prompt tokens computed in the turns with edits."""
    edited_ttft: float
    """Median milliseconds of the turns with edits."""
    ttft: float
    """Milliseconds waited for first tokens, in sum."""


def edited_turns(arms: Arms) -> list[int]:
    """Turns in which any arm edited (both editing arms run the same policies on the same trajectory)."""
    return sorted({row.turn for rows in arms.values() for row in rows if row.edits})


def totals(rows: Sequence[Row], edited: Sequence[int]) -> Totals:
    """Sum up an arm."""
    chosen = [row for row in rows if row.turn in edited]
    return Totals(
        last_prompt=rows[-1].prompt_tokens,
        prompt=sum(row.prompt_tokens for row in rows),
        prefilled=sum(row.prefilled_tokens for row in rows),
        rotated=sum(row.rotated_tokens for row in rows),
        edits=sum(row.edits for row in rows),
        edited_prefill=sum(row.prefilled_tokens for row in chosen),
        edited_ttft=median(row.ttft_ms for row in chosen) if chosen else 0.0,
        ttft=sum(row.ttft_ms for row in rows),
    )


def summary(arms: Arms) -> str:
    """The closing words."""
    edited = edited_turns(arms)
    if not edited:
        return "No policy edited anything, so the arms differ by chance only."
    keep, forget, amortize = (totals(arms[name], edited) for name in ("keep-all", "forget", "amortize"))
    shorter = 100 * (1 - amortize.last_prompt / keep.last_prompt)
    forget_work = _times(forget.edited_prefill, keep.edited_prefill)
    amortize_work = _times(amortize.edited_prefill, keep.edited_prefill)
    forget_wait, amortize_wait = (_times(one.edited_ttft, keep.edited_ttft) for one in (forget, amortize))
    words = (
        f"The last prompt is {shorter:.0f} % shorter with the edits than without. In the turns with edits, forget "
        f"computed {forget_work} the prompt tokens that keep-all did: everything after an edit again. Amortize "
        f"computed {amortize_work}: the stubs and what was new; the {amortize.rotated:,} tokens in between were moved "
        f"inside the cache, their keys rotated. Median time to first token in those turns, against keep-all: "
        f"forget {forget_wait}, amortize {amortize_wait}."
    )
    lines = [
        f"What this shows. Policies made {amortize.edits} edits in {len(edited)} of {len(arms['amortize'])} turns.",
        "",
        f"  {'':<10}{'last prompt':>13}{'prefilled':>12}{'rotated':>10}{'TTFT, edited turns':>21}{'TTFT, sum':>12}",
        *(_arm_line(name, one) for name, one in (("keep-all", keep), ("forget", forget), ("amortize", amortize))),
        "",
        *textwrap.wrap(words, 88, initial_indent="  ", subsequent_indent="  "),
    ]
    return "\n".join(lines)


def _arm_line(name: str, one: Totals) -> str:
    return (
        f"  {name:<10}{one.last_prompt:>13,}{one.prefilled:>12,}{one.rotated:>10,}"
        f"{one.edited_ttft:>15,.0f} ms   {one.ttft / 1000:>8.1f} s"
    )


def _times(value: float, base: float) -> str:
    return f"{value / base:.1f}×" if base else "–"
