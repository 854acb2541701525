"""``ephemeral-tags``: what the agent marked as ephemeral goes once its time is over."""

from __future__ import annotations

import re
from functools import partial

from leyline_client.policy import Edit, MessageView, PolicyBase, Transcript

from ._fields import PositiveInt, Strings, Stub


class EphemeralTags(PolicyBase):
    """The agent knows best what it will not need: it wraps that in tags (AKV's agent-directed drop).

    ``<ephemeral_observation>…</ephemeral_observation>``, or with its own time ``<ephemeral_observation ttl="3">``.
    Nested tags go with the outermost; a tag that is never closed marks nothing. A message that holds nothing else
    keeps its tags, so that it is not left empty.
    """

    name = "ephemeral-tags"
    summary = "Cuts what the agent wrapped in tags once it is older than its time to live."
    origin = "AKV"
    examples = ({}, {"ttl": 2, "stub": "[expired]"})

    tags: Strings = ("ephemeral_observation",)
    """Names of the tags."""
    ttl: PositiveInt = 1
    """Turns that tagged text stays, its own included; a ``ttl`` attribute overrides it."""
    stub: Stub = ""
    """Stands for tagged text. Empty, the default: a pure deletion."""

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Cuts what has expired."""
        edits: list[Edit] = []
        key = (self.name, self.tags)
        for view in transcript.messages:
            if view.protected or view.removed:
                continue
            for start, end, ttl in view.derive(key, partial(self._spans, view)):
                if view.age >= (ttl or self.ttl):
                    edits += view.cut(start, end, self.stub)
        return edits

    def _spans(self, view: MessageView) -> list[tuple[int, int, int | None]]:
        if "</" not in view.text:
            return []
        found = [span for tag in self.tags for span in _tagged(view.text, tag)]
        spans = [(start, end, ttl) for start, end, _, _, ttl in _outermost(found)]
        rest, position = "", 0
        for start, end, _ in spans:
            rest += view.text[position:start]
            position = end
        if (rest + view.text[position:]).strip():
            return spans
        return [(inner, close, ttl) for _, _, inner, close, ttl in _outermost(found) if inner < close]


_Tagged = tuple[int, int, int, int, int | None]
"""Start and end with the tags, start and end of what is between, the time to live."""


def _tagged(text: str, tag: str) -> list[_Tagged]:
    found: list[_Tagged] = []
    open_at: list[re.Match[str]] = []
    for match in re.finditer(rf"<(/?){re.escape(tag)}(?:\s+ttl=\"(\d{{1,6}})\")?\s*>", text):
        if not match[1]:
            open_at.append(match)
        elif open_at:
            start = open_at.pop()
            ttl = int(start[2]) if start[2] else None
            found.append((start.start(), match.end(), start.end(), match.start(), ttl))
    return found


def _outermost(found: list[_Tagged]) -> list[_Tagged]:
    result: list[_Tagged] = []
    for one in sorted(found, key=lambda one: (one[0], -one[1])):
        if not result or one[0] >= result[-1][1]:
            result.append(one)
    return result
