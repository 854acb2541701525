"""``tiered``: nothing below a threshold, then cheap drops, then a summary."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainValidator, PrivateAttr, model_validator

from leyline_client.policy import Edit, MessageView, Policy, PolicyBase, Transcript, plan_in_order, resolve

from ._clearing import HYSTERESIS, worthwhile
from ._fields import FROM_NAME, NaturalInt, PositiveInt
from ._units import Unit, emptied, removed, units

MAX_SUMMARIES = 256


def _resolve(value: Any) -> Any:
    return resolve([value] if isinstance(value, str) else list(value)).policies


def first_lines(text: str, limit: int = 60) -> str:
    """A summary that needs no model: the beginning of each message."""
    return "\n".join(paragraph.strip().splitlines()[0][:limit] for paragraph in text.split("\n\n") if paragraph.strip())


class Tiered(PolicyBase):
    """AKV's decision tree. Each tier acts on what the one before leaves over, and only if it frees enough.

    The summary replaces old turns: the first of them keeps its messages, emptied, and holds the summary in a tool
    result (or, if it has none, in a reply); the others go. Calls and results stay paired. A turn in which something is
    edited already is emptied, not removed, so an earlier summary stays; one that the agent asked for again stays whole.
    """

    name = "tiered"
    summary = "Nothing below a threshold, then cheap drops, then a summary by your own function."
    origin = "AKV decision tree"
    removes_messages: ClassVar[bool] = True
    examples = (
        {"trigger": 100, "summarise_trigger": 200, "summarise": "leyline_policies.tiered:first_lines", "keep_last": 1},
        {"trigger": 100, "drop": ["truncate-older-than-n:n=1,max_chars=20"]},
    )

    trigger: PositiveInt = 32_000
    """Prompt tokens (as edited) below which nothing happens."""
    drop: Annotated[tuple[Policy, ...], PlainValidator(_resolve), Field(exclude=True)] = Field(
        default=("ephemeral-tags", "stale-tool-detector", "truncate-older-than-n")  # type: ignore[arg-type]
    )
    """Policies of the second tier, in order; objects or names as for `resolve`."""
    summarise_trigger: PositiveInt = 64_000
    """Prompt tokens, after dropping, from which old turns are summarised."""
    summarise: Annotated[Callable[[str], str] | None, FROM_NAME] = Field(default=None, exclude=True)
    """Your function from a text of old turns to a summary, or ``module:function``; called once per text. None: there
    is no third tier."""
    keep_last: NaturalInt = 4
    """Newest turns that are never summarised, the current one not counted."""
    clear_at_least: NaturalInt | None = None
    """Tokens a tier must free, or it does nothing. None: a tenth of its trigger."""

    _summaries: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.summarise_trigger < self.trigger:
            raise ValueError(f"summarise_trigger ({self.summarise_trigger}) is lower than trigger ({self.trigger})")
        return self

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Goes up the tiers as far as needed."""
        tokens = transcript.tokens
        if tokens < self.trigger:
            return []
        wanted = plan_in_order(self.drop, transcript)
        edits = worthwhile(transcript, [wanted], self.trigger, self.clear_at_least)
        if self.summarise is None or tokens - transcript.gain(edits) < self.summarise_trigger:
            return edits
        dropped = transcript.with_edits(edits) if edits else transcript
        return [*edits, *self._summarise(dropped, self.summarise)]

    def _summarise(self, transcript: Transcript, summarise: Callable[[str], str]) -> list[Edit]:
        old = units(transcript)
        block = [
            unit for unit in old[: max(0, len(old) - self.keep_last)] if not any(map(transcript.asked_again, unit))
        ]
        holders = [view for unit in block for view in _holders(unit)]
        floor = self.summarise_trigger // HYSTERESIS if self.clear_at_least is None else self.clear_at_least
        # No summary is asked for that could not pay.
        if not holders or transcript.gain([*chain(*_around(holders[0], block))]) < max(1, floor):
            return []
        texts = [(view.role, view.now()) for unit in block for view in unit]
        summary = self._summary("\n\n".join(f"{role}: {text}" for role, text in texts if text.strip()), summarise)
        for place in holders:
            # Where it would be no shorter than what it replaces, there is no edit, and it would stand nowhere.
            if placed := place.cut(0, len(place.text), summary):
                plans = [*_around(place, block), placed]
                return worthwhile(transcript, plans, self.summarise_trigger, self.clear_at_least)
        return []

    def _summary(self, text: str, summarise: Callable[[str], str]) -> str:
        # Remembered because a plan is asked for twice, and a model's summary is another one each time.
        if text not in self._summaries:
            while len(self._summaries) >= MAX_SUMMARIES:
                self._summaries.pop(next(iter(self._summaries)))
            self._summaries[text] = summarise(text)
        return self._summaries[text]


def _around(place: MessageView, block: list[Unit]) -> list[list[Edit]]:
    """Edits that leave of ``block`` only ``place`` and, emptied, what has to stay with it."""
    return [emptied(unit, keep=place) if place in unit else removed(unit) for unit in block]


def _holders(unit: Unit) -> list[MessageView]:
    """Messages of a unit that can hold a summary, best first: tool results, then replies."""
    free = [view for view in unit if view.text and not view.edited]
    return [view for view in free if view.is_result] + [view for view in free if view.role == "assistant"]
