"""``redact``: takes secrets out of the conversation, and out of what the model computed after them."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Annotated

from pydantic import Field, field_validator

from leyline_client.policy import Edit, MessageView, Mode, Part, PolicyBase, Transcript

from ._fields import Strings, Stub

Spans = tuple[tuple[int, int], ...]


class Redact(PolicyBase):
    """Replaces every match, in every message but the system prompt, once its turn is over.

    The model has then seen the secret once. With the default mode ``forget`` nothing computed after it is reused: the
    server prefills again from there. ``amortize`` would take the text away and leave its influence. Put this policy
    first: what another policy cut out before, this one cannot see.
    """

    name = "redact"
    summary = "Replaces what matches the patterns, and has the server forget it."
    origin = "Leyline"
    examples = ({}, {"mode": "amortize", "stub": "x"})

    patterns: Strings = (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"\bAKIA[0-9A-Z]{16}\b",
        r"\bgh[pousr]_[A-Za-z0-9]{36,}\b",
        r"\bsk-[A-Za-z0-9_-]{20,}\b",
        r"\bxox[abprs]-[A-Za-z0-9-]{10,}\b",
        r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    )
    """Regular expressions. The default knows private keys and the tokens of some large services; add your own."""
    mode: Mode = Mode.FORGET
    """``forget``, or ``amortize`` where the influence may stay."""
    stub: Annotated[Stub, Field(min_length=1)] = "[redacted]"
    """Stands for a match."""

    @field_validator("patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                matches_nothing = re.compile(pattern).search("")
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
            if matches_nothing:
                raise ValueError(f"{pattern!r} matches the empty text")
        return patterns

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Replaces what is still there."""
        edits: list[Edit] = []
        for view in transcript.messages:
            if not (view.protected or view.removed):
                edits += self._redact(view)
        return edits

    def _redact(self, view: MessageView) -> list[Edit]:
        found = view.derive((self.name, self.patterns), lambda: _find(view, self.patterns))
        edits: list[Edit] = []
        for (part, call), spans in found:
            wanted: list[Edit] = []
            for start, end in spans:
                wanted += view.replace(start, end, self.stub, part=part, call=call, mode=self.mode)
            is_json = part is Part.ARGUMENTS and _is_object(view.now(part, call))
            if is_json and not _is_object(view.preview(wanted, part, call)):
                # Cutting there would leave no JSON: the arguments go as a whole.
                wanted = view.clear_arguments(call, mode=self.mode)
            edits += wanted
        return edits


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


def _find(view: MessageView, patterns: tuple[str, ...]) -> list[tuple[tuple[Part, int], Spans]]:
    found = []
    for where, text in view.texts.items():
        spans: list[tuple[int, int]] = []
        for start, end in sorted(match.span() for pattern in _compiled(patterns) for match in pattern.finditer(text)):
            if start == end:
                continue
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        if spans:
            found.append((where, tuple(spans)))
    return found


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
