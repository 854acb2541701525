"""``attention-mass``: clears tool results that the model has stopped looking at."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from leyline_client import PolicyError
from leyline_client.policy import Edit, MessageView, PolicyBase, Transcript

from ._clearing import clearable
from ._fields import Names, NaturalInt, PositiveInt, Stub, matches


class AttentionMass(PolicyBase):
    """AKV's server-driven drop: attention below ``epsilon`` in each of the newest ``turns`` turns.

    Needs the attention mass per message, which only the server can measure; without it ``plan`` raises PolicyError.
    Attention is an imperfect sign of relevance: something needed at the very end looks the same as something done with.
    """

    name = "attention-mass"
    summary = "Clears tool results that got almost no attention for some turns. Needs server support."
    origin = "AKV, server-driven"
    examples = ({"turns": 1, "min_chars": 20},)

    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.001
    """Share of a turn's attention, between 0 and 1, below which a message counts as not looked at."""
    turns: PositiveInt = 3
    """Turns in a row that it must have been below."""
    min_chars: NaturalInt = 80
    """Shorter results stay."""
    exclude_tools: Names = ()
    """Tools whose results stay."""
    stub: Stub = "[not attended to]"
    """Stands for a result. Empty: a pure deletion that leaves the beginning of the first line."""

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Clears what is below epsilon."""
        if transcript.attention is None:
            raise PolicyError("needs server support: this server offers no attention mass", policy=self.name)
        edits: list[Edit] = []
        for view in transcript.results(self.turns):
            if self._ignored(transcript.attention, view.index) and self._may_clear(transcript, view):
                edits += view.clear(self.stub)
        return edits

    def _ignored(self, attention: tuple[tuple[float, ...], ...], index: int) -> bool:
        recent = attention[index][-self.turns :] if index < len(attention) else ()
        return len(recent) == self.turns and all(mass < self.epsilon for mass in recent)

    def _may_clear(self, transcript: Transcript, view: MessageView) -> bool:
        return (
            clearable(transcript, view)
            and len(view.text) >= self.min_chars
            and not matches(view.tool, self.exclude_tools)
        )
