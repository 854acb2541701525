"""``token-budget``: a rolling window with two marks, dropping whole turns from the oldest."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from leyline_client.policy import Edit, PolicyBase, Transcript

from ._fields import NaturalInt, PositiveInt, Stub
from ._units import emptied, removed, units


class TokenBudget(PolicyBase):
    """When the prompt reaches ``trigger``, the oldest units go until it is at ``target``.

    A unit is an assistant message with its tool results; an exchange that is over (the user has spoken again since)
    goes as a whole with its user message. System messages, the newest user message and the current turn always stay.
    """

    name = "token-budget"
    summary = "At a trigger, drops the oldest turns until the prompt is at a lower target."
    origin = "AKV rolling window"
    removes_messages: ClassVar[bool] = True
    examples = (
        {"trigger": 300, "target": 150, "keep_first": 0, "keep_last": 1},
        {"trigger": 300, "target": 100, "style": "stub"},
    )

    trigger: PositiveInt = 64_000
    """Prompt tokens (as edited) at which dropping starts."""
    target: PositiveInt = 48_000
    """Prompt tokens at which it stops. Must be lower, or every turn would drop something."""
    keep_first: NaturalInt = 1
    """Oldest units that stay."""
    keep_last: NaturalInt = 4
    """Newest units that stay, the current turn not counted."""
    style: Literal["drop", "stub"] = "drop"
    """``drop`` removes the messages (a pure deletion). ``stub`` keeps them and empties them. A unit in which
    something is already edited is emptied in either case."""
    stub: Stub = "[dropped]"
    """Stands for a tool result or reply with style ``stub``. Empty: a pure deletion that leaves the beginning of the
    first line."""

    @model_validator(mode="after")
    def _two_marks(self) -> Self:
        if self.target >= self.trigger:
            raise ValueError(f"target ({self.target}) must be lower than trigger ({self.trigger})")
        return self

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Drops down to the target once the trigger is reached."""
        excess = transcript.tokens - self.target
        if excess < self.trigger - self.target:
            return []
        droppable = units(transcript)
        edits: list[Edit] = []
        freed = 0
        old = droppable[self.keep_first : max(0, len(droppable) - self.keep_last)]
        # What the agent had to ask for again goes last, and only if the prompt would still be at its trigger without:
        # else it asks for it every few turns.
        again = [unit for unit in old if any(map(transcript.asked_again, unit))]
        for unit in [*(unit for unit in old if unit not in again), *again]:
            if freed >= (excess - (self.trigger - self.target) if unit in again else excess):
                break
            plan = removed(unit) if self.style == "drop" else emptied(unit, self.stub)
            edits += plan
            freed += transcript.gain(plan)
        # A prompt that stays above its trigger must not lose one more unit every turn: half the way down, or nothing.
        return edits if freed >= (self.trigger - self.target) / 2 else []
