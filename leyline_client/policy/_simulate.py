"""What policies would do to a recorded conversation, turn by turn, without a server.

The costs compare three servers that see the same edits. One with a prefix cache prefills from the first edited
position on. Leyline with ``amortize`` prefills the replacements and what is new; from a ``forget`` on it prefills like
the first. The third never edits. Prefill is counted in tokens of the given counter; the one token that an engine always
recomputes is left out everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from leyline_client._models import Edit, Mode, Part

from ._set import PolicySet
from ._transcript import Transcript
from ._view import MessageView

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EditRow:
    """One edit, without its text."""

    message: int
    role: str
    tool: str
    part: str
    mode: str
    characters: int
    """Characters that go."""
    replacement: str
    freed_tokens: int


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn. All counts are tokens."""

    turn: int
    messages: int
    full_tokens: int
    """The prompt without any edit."""
    prompt_tokens: int
    """The prompt with all edits so far."""
    new_tokens: int
    """Of messages that came since the turn before: what a server prefills that never edits."""
    freed_tokens: int
    """Taken out by the edits of this turn."""
    reprefill_tokens: int
    """Prefilled by a server with a prefix cache."""
    amortize_tokens: int
    """Prefilled with Leyline."""
    edits: tuple[EditRow, ...] = ()

    @property
    def churn_tokens(self) -> int:
        """Prefill that the edits cost a server with a prefix cache, above what is new."""
        return self.reprefill_tokens - self.new_tokens


@dataclass(frozen=True, slots=True)
class Simulation:
    """One conversation under some policies."""

    policies: tuple[str, ...]
    counter: str
    exact: bool
    """False: token counts are estimates."""
    turns: tuple[TurnRow, ...]

    def total(self, field: str) -> int:
        """Sum of one count over all turns."""
        return sum(int(getattr(turn, field)) for turn in self.turns)

    def as_json(self) -> dict[str, Any]:
        """Everything, with totals, as plain data."""
        fields = ("new_tokens", "freed_tokens", "reprefill_tokens", "amortize_tokens")
        totals: dict[str, int] = {field: self.total(field) for field in fields}
        totals["edits"] = sum(len(turn.edits) for turn in self.turns)
        totals["turns_with_edits"] = sum(1 for turn in self.turns if turn.edits)
        return {**asdict(self), "totals": totals}


def read_conversations(lines: Iterable[str]) -> list[list[list[Message]]]:
    """Conversations as lists of requests, from JSON lines.

    A line is one message of a single conversation, or the messages of one request, bare or in an object's
    ``messages``. A request that extends the one before belongs to the same conversation. A conversation of only one
    request is replayed: it is cut before each assistant message.

    Raises:
        ValueError: naming the line that is none of these.
    """
    singles: list[Message] = []
    conversations: list[list[list[Message]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        value = _parse(number, line)
        if isinstance(value, Mapping) and "role" in value:
            singles.append(value)
            continue
        messages = value.get("messages") if isinstance(value, Mapping) else value
        if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
            raise ValueError(f"line {number} holds neither a message nor a list of messages")
        last = conversations[-1][-1] if conversations else None
        if last is not None and len(messages) > len(last) and messages[: len(last)] == last:
            conversations[-1].append(messages)
        else:
            conversations.append([messages])
    if singles and conversations:
        raise ValueError("the file mixes single messages and lists of messages")
    if singles:
        conversations = [[singles]]
    return [list(requests(one[0])) if len(one) == 1 else one for one in conversations]


def requests(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The requests that led to ``messages``: the history before each assistant message, and all of it if it goes on."""
    before = ""
    for index, message in enumerate(messages):
        role = message.get("role")
        if role == "assistant" and index and before != "assistant":
            yield list(messages[:index])
        before = str(role)
    if before != "assistant":
        yield list(messages)


def simulate(policies: PolicySet, turns: Sequence[Sequence[Message]]) -> Simulation:
    """Plans ``turns``, requests of one conversation, in order. Raises what `PolicySet.plan` raises."""
    standing: list[Edit] = []
    rows: list[TurnRow] = []
    seen = 0
    for number, messages in enumerate(turns, 1):
        before = policies.transcript(messages, standing=standing)
        new = policies.plan(messages, standing=standing)
        rows.append(_row(number, before, before.with_edits(new) if new else before, new, seen))
        standing += new
        seen = len(messages)
    names = tuple(policy.name for policy in policies.policies)
    return Simulation(names, policies.counter.name, policies.counter.exact, tuple(rows))


def _parse(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}") from None


def _row(number: int, before: Transcript, after: Transcript, new: list[Edit], seen: int) -> TurnRow:
    fresh = sum(view.tokens_now for view in after.messages[seen:])
    prompt = after.tokens
    replacements = sum(after.counter.count(edit.replacement) for edit in new if edit.mode is Mode.AMORTIZE)
    forgets = [edit for edit in new if edit.mode is Mode.FORGET]
    plain = prompt - min([_kept_before(before, edit) for edit in new], default=prompt - fresh)
    forgotten = prompt - min([_kept_before(before, edit) for edit in forgets], default=prompt - fresh)
    return TurnRow(
        turn=number,
        messages=len(after),
        full_tokens=sum(view.tokens for view in after) + after.tools_tokens,
        prompt_tokens=prompt,
        new_tokens=fresh,
        freed_tokens=before.tokens - prompt,
        reprefill_tokens=max(plain, fresh),
        amortize_tokens=min(max(forgotten, fresh) + replacements, max(plain, fresh)),
        edits=tuple(_edit_row(before, edit) for edit in new),
    )


def _kept_before(transcript: Transcript, edit: Edit) -> int:
    """Tokens of the prompt before the edit, up to its first character."""
    views = transcript.messages
    kept = sum(view.tokens_now for view in views[: edit.message]) + transcript.tools_tokens
    return (
        kept if edit.part is Part.MESSAGE else kept + transcript.counter.count(_text_before(views[edit.message], edit))
    )


def _text_before(view: MessageView, edit: Edit) -> str:
    text = view.texts[edit.part, edit.call]
    return "".join(text[low : min(high, edit.start or 0)] for low, high in view.free(edit.part, edit.call))


def _edit_row(transcript: Transcript, edit: Edit) -> EditRow:
    view = transcript.messages[edit.message]
    if edit.part is Part.MESSAGE:
        characters = sum(map(len, view.texts.values()))
    else:
        size = len(view.texts[edit.part, edit.call])
        characters = (size if edit.end is None else edit.end) - (edit.start or 0)
    freed = transcript.gain([edit])
    return EditRow(
        edit.message, view.role, view.tool, edit.part.value, edit.mode.value, characters, edit.replacement, freed
    )
