"""One message as a policy sees it, and the edits it can make of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from leyline_client._models import Edit, Mode, Part

from ._facts import CallFacts, Facts, Where
from ._spans import Span, length, subtract

if TYPE_CHECKING:
    from ._transcript import Transcript

T = TypeVar("T")
HEAD = 40
"""Characters of a text that stay where it is cleared without a stub."""
CONTENT: Where = (Part.CONTENT, 0)
REASONING: Where = (Part.REASONING, 0)


class MessageView:
    """A message, where it stands in the conversation, and what is already edited in it. Read only.

    Characters and edits are in the coordinates of the message as the agent wrote it.
    """

    __slots__ = ("_facts", "_transcript", "answers", "call", "group", "index", "turn")

    def __init__(self, transcript: Transcript, index: int, facts: Facts, turn: int) -> None:
        self._transcript = transcript
        self._facts = facts
        self.index = index
        """Position in the agent's ``messages``."""
        self.turn = turn
        """Turn it belongs to, from 0 (before the first assistant message)."""
        self.group = index
        """Index of the assistant message whose tool call this answers; else its own index."""
        self.call: CallFacts | None = None
        """Of a tool result: the call it answers (None: an orphan)."""
        self.answers: tuple[int, ...] = ()
        """Of an assistant message: indices of the results of its tool calls."""

    @property
    def role(self) -> str:
        """``system``, ``developer``, ``user``, ``assistant``, ``tool``, ``function``."""
        return self._facts.role

    @property
    def age(self) -> int:
        """Turns since: 0 in the current turn."""
        return self._transcript.turn - self.turn

    @property
    def is_system(self) -> bool:
        """A system or developer message, wherever it stands: never to be edited."""
        return self._facts.is_system

    @property
    def is_result(self) -> bool:
        """A tool's result."""
        return self._facts.is_result

    @property
    def is_task(self) -> bool:
        """The newest user message: it may lose parts, but neither be removed nor emptied."""
        return self.index == self._transcript.task

    @property
    def protected(self) -> bool:
        """System prompt or current turn: a policy that edits it is refused."""
        return self._facts.is_system or self.turn == self._transcript.turn

    @property
    def removed(self) -> bool:
        """Removed by an edit that already stands."""
        return self.index in self._transcript.removed

    @property
    def edited(self) -> bool:
        """Some edit of this message already stands."""
        return self.index in self._transcript.touched

    @property
    def tool(self) -> str:
        """Of a tool result: name of the tool; else empty."""
        return self.call.name if self.call is not None else (self._facts.name or "" if self.is_result else "")

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Of a tool result: arguments of the call it answers; empty where unknown."""
        return self.call.parsed if self.call is not None else {}

    @property
    def calls(self) -> tuple[CallFacts, ...]:
        """Of an assistant message: its tool calls."""
        return self._facts.calls

    @property
    def text(self) -> str:
        """The text content as the agent wrote it (of block content: the text blocks, joined)."""
        return self._facts.texts.get(CONTENT, "")

    @property
    def reasoning(self) -> str:
        """``reasoning_content``, or empty."""
        return self._facts.texts.get(REASONING, "")

    @property
    def texts(self) -> Mapping[Where, str]:
        """Every text that an edit can touch, by (part, call)."""
        return MappingProxyType(self._facts.texts)

    @property
    def opaque(self) -> int:
        """Number of content blocks that are no text (images, files). They stay as they are."""
        return self._facts.opaque

    @property
    def raw(self) -> Mapping[str, Any]:
        """The agent's own message, read only at every depth."""
        frozen: Mapping[str, Any] = _read_only(self._transcript.raw_message(self.index))
        return frozen

    def copy(self) -> dict[str, Any]:
        """A copy of the agent's own message that may be changed."""
        copied: dict[str, Any] = _plain(self._transcript.raw_message(self.index))
        return copied

    @property
    def tokens(self) -> int:
        """Tokens of the message as the agent wrote it."""
        return self._transcript.tokens_of(self.index)

    @property
    def tokens_now(self) -> int:
        """Tokens with the standing edits carried out."""
        return self.tokens - self._transcript.freed_of(self.index)

    def derive(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, remembered for as long as equal messages are met.

        ``key`` must name the computation and its parameters; the result must depend on them and this message only,
        not on its age, its neighbours or what is edited.
        """
        memo = self._facts.memo
        try:
            value: T = memo[key]
        except KeyError:
            value = memo[key] = make()
        return value

    def free(self, part: Part = Part.CONTENT, call: int = 0) -> tuple[Span, ...]:
        """Spans of a text that no standing edit touches yet, in order."""
        text = self._facts.texts.get((part, call))
        if not text or self.removed:
            return ()
        return subtract((0, len(text)), self._transcript.covered.get((self.index, (part, call)), ()))

    def free_chars(self, part: Part = Part.CONTENT, call: int = 0) -> int:
        """Characters in `free`."""
        return length(self.free(part, call))

    def now(self, part: Part = Part.CONTENT, call: int = 0) -> str:
        """The text with the standing edits carried out."""
        return self._transcript.text_now(self.index, (part, call))

    def preview(self, edits: Sequence[Edit], part: Part = Part.CONTENT, call: int = 0) -> str:
        """The text with the standing edits and ``edits``, new ones of this text, carried out."""
        return self._transcript.text_now(self.index, (part, call), edits)

    def cut(
        self,
        start: int,
        end: int,
        stub: str = "",
        *,
        part: Part = Part.CONTENT,
        call: int = 0,
        mode: Mode = Mode.AMORTIZE,
    ) -> list[Edit]:
        """Edits that replace characters ``[start, end)`` by ``stub``, or nothing where that would not make it shorter.

        What already stands is left alone: only what is still there of the span goes. If an edit that stands
        inside the span left a stub of its own, that one serves and no second is put beside it.
        """
        edits = self.replace(start, end, stub, part=part, call=call, mode=mode)
        gone = sum((edit.end or 0) - (edit.start or 0) for edit in edits)
        return edits if gone > sum(len(edit.replacement) for edit in edits) else []

    def replace(
        self,
        start: int,
        end: int,
        text: str = "",
        *,
        part: Part = Part.CONTENT,
        call: int = 0,
        mode: Mode = Mode.AMORTIZE,
    ) -> list[Edit]:
        """Like `cut`, whether shorter or not."""
        key = (part, call)
        spans = [span for piece in self.free(part, call) if (span := _overlap(piece, (start, end)))]
        if self._transcript.stub_inside(self.index, key, (start, end)):
            text = ""
        edits = []
        for low, high in spans:
            edits.append(
                Edit(message=self.index, replacement=text, part=part, call=call, start=low, end=high, mode=mode)
            )
            text = ""
        return edits

    def clear(self, stub: str = "", *, mode: Mode = Mode.AMORTIZE) -> list[Edit]:
        """`cut` over the whole content.

        With an empty ``stub`` the beginning of the first line stays (at most `HEAD` characters): that is a pure
        deletion, which costs the server no forward, and many providers and chat templates refuse an empty message,
        or drop it.
        """
        text = self.text
        start = 0 if stub or self._transcript.stub_inside(self.index, CONTENT, (0, len(text))) else head_length(text)
        return self.cut(start, len(text), stub, mode=mode)

    def clear_arguments(self, call: int, *, mode: Mode = Mode.AMORTIZE) -> list[Edit]:
        """Empties the arguments of one call down to ``{}``, a pure deletion.

        Nothing where they are no JSON object, or something is edited in them: a stub between the braces is no JSON.
        """
        key = (Part.ARGUMENTS, call)
        text = self._facts.texts.get(key, "")
        edited = (self.index, key) in self._transcript.covered
        if edited or not (text.startswith("{") and text.endswith("}")):
            return []
        return self.cut(1, len(text) - 1, part=Part.ARGUMENTS, call=call, mode=mode)

    def clear_reasoning(self, stub: str = "", *, mode: Mode = Mode.AMORTIZE) -> list[Edit]:
        """`cut` over the whole reasoning content."""
        return self.cut(0, len(self.reasoning), stub, part=Part.REASONING, mode=mode)

    def remove(self, mode: Mode = Mode.AMORTIZE) -> Edit:
        """An edit that removes the whole message (the policy must declare ``removes_messages``)."""
        return Edit(message=self.index, part=Part.MESSAGE, mode=mode)

    def __repr__(self) -> str:
        return f"<{self.role} message {self.index}, age {self.age}, {self._facts.size} characters>"


def head_length(text: str, most: int = HEAD) -> int:
    """How much of ``text`` to keep so that something is left: its first line, if short, else up to a word's end."""
    skip = len(text) - len(text.lstrip())
    line = text.find("\n", skip)
    if skip < line <= skip + most:
        return line
    if len(text) <= skip + most:
        return len(text)
    space = text.rfind(" ", skip + 1, skip + most)
    return space if space > 0 else skip + most


def _overlap(one: Span, other: Span) -> Span | None:
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return (start, end) if start < end else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _read_only(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({key: _read_only(one) for key, one in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_read_only(one) for one in value)
    return value
