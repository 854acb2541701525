"""A case as token ids: the server renders, so the tokens are those of its own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_client import Directive, LeylineClient, Part, apply_edits
from leyline_client._models import apply_directives
from leyline_evals.common import EvalError
from leyline_evals.fidelity.cases import Case

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """Token ids of one case.

    ``source`` is cached when the ``directives`` (in its coordinates) come; it ends with the last word of the last whole
    message of the assistant, as after a generation. ``tail`` follows the edited source. ``repair_tail`` is the same
    with the erratum before the question.
    """

    source: list[int]
    directives: tuple[Directive, ...]
    tail: list[int]
    repair_tail: list[int]

    @property
    def edited(self) -> list[int]:
        """The source after the edits."""
        return apply_directives(self.source, self.directives)

    @property
    def distance(self) -> int:
        """Tokens between the end of the last edit and the end of the source."""
        return len(self.source) - self.directives[-1].end


def build(client: LeylineClient, case: Case) -> Prompt:
    """Render ``case``.

    Raises:
        EvalError: the template does not render messages one after the other, so that no cached part can be told.
    """
    messages = list(case.messages)
    source, tail = _rendered(client, messages, case)
    question = {**messages[-2], "content": f"{case.erratum}\n{messages[-2]['content']}"}
    again, repair = _rendered(client, [*messages[:-2], question, messages[-1]], case)
    if again != source:
        raise EvalError(f"{case.name}: this chat template renders a message differently when a later one changes")
    return Prompt(source, _directives(client, messages, case, source), tail, repair)


def _rendered(client: LeylineClient, messages: Messages, case: Case) -> tuple[list[int], list[int]]:
    """The cached tokens, and those after them up to the end of the answer that was begun."""
    reply = client.render([dict(message) for message in messages], add_generation_prompt=False)
    ends = {span.message: span.end for span in reply.spans if span.part is Part.CONTENT}
    last = len(messages) - 1
    if reply.token_ids is None or last not in ends or last - 2 not in ends:
        raise EvalError(f"{case.name}: this chat template changes the messages' text")
    boundary = ends[last - 2]
    return reply.token_ids[:boundary], reply.token_ids[boundary : ends[last]]


def _directives(client: LeylineClient, messages: Messages, case: Case, source: list[int]) -> tuple[Directive, ...]:
    """The edits as token spans, one per edit.

    The conversation is rendered as edited so far, edit by edit from the last to the first; what differs is that edit's
    span, whose position in the source the edits before it do not change.
    """
    before = source
    found: list[Directive] = []
    for count in range(1, len(case.edits) + 1):
        done = case.edits[len(case.edits) - count :]
        after, _ = _rendered(client, apply_edits(messages, done), case)
        start = _common(before, after)
        shared = _common(before[start:][::-1], after[start:][::-1])
        end, new = len(before) - shared, tuple(after[start : len(after) - shared])
        found.insert(0, Directive(start=start, end=end, replacement=new))
        before = after
    if apply_directives(source, found) != before:
        raise EvalError(f"{case.name}: its edits touch each other")
    return tuple(found)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
