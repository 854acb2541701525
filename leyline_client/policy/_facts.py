"""What a message says by itself: parsed once, remembered across turns.

A `Facts` depends on nothing but the message's own fields, so it is shared by every turn that holds an equal
message. `FactsCache` finds it by value, never by the identity of the message object: an agent that changes a
message in place, or rebuilds its dicts every turn, gets the right facts either way. Python remembers the hash
of a string, so an unchanged message costs about a microsecond.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from leyline_client._edits import Message, part_text
from leyline_client._models import Part

from ._tokens import TokenCounter

SYSTEM_ROLES = frozenset({"system", "developer"})
TEXT_BLOCKS = frozenset({"text", "input_text", "output_text"})
RESULT_ROLES = frozenset({"tool", "function"})

Where = tuple[Part, int]
"""One editable text of a message: the part, and for arguments the number of the call."""


class CallFacts:
    """One tool call of an assistant message."""

    __slots__ = ("_parsed", "arguments", "editable", "id", "name", "number")

    def __init__(self, number: int, id: str | None, name: str, arguments: str, editable: bool) -> None:
        self.number = number
        self.id = id
        self.name = name
        self.arguments = arguments
        """The argument string as the model wrote it (of a custom tool: its input)."""
        self.editable = editable
        """False where no edit can name the arguments (custom tools, the old ``function_call``)."""
        self._parsed: Mapping[str, Any] | None = None

    @property
    def parsed(self) -> Mapping[str, Any]:
        """The arguments as a mapping, parsed on first use; empty where they are no JSON object."""
        if self._parsed is None:
            try:
                value = json.loads(self.arguments)
            except ValueError:
                value = None
            self._parsed = value if isinstance(value, dict) else {}
        return self._parsed


class Facts:
    """One message: role, texts, tool calls, token counts."""

    __slots__ = (
        "_text_tokens",
        "_tokens",
        "calls",
        "is_result",
        "is_system",
        "key",
        "memo",
        "name",
        "opaque",
        "role",
        "size",
        "texts",
        "tool_call_id",
    )

    def __init__(self, message: Message, key: object = None) -> None:
        self.key = message_key(message) if key is None else key
        self.role = _text(message.get("role")) or ""
        self.is_system = self.role in SYSTEM_ROLES
        self.is_result = self.role in RESULT_ROLES
        self.name = _text(message.get("name"))
        self.tool_call_id = _text(message.get("tool_call_id"))
        self.calls = _calls(message)
        self.opaque = _opaque_blocks(message.get("content"))
        """Content blocks that are not text (images, audio, files): kept as they are, counted by a fixed estimate."""
        self.texts: dict[Where, str] = {}
        for part in (Part.CONTENT, Part.REASONING):
            text = part_text(message, part)
            if text is not None:
                self.texts[part, 0] = text
        for call in self.calls:
            if call.editable:
                self.texts[Part.ARGUMENTS, call.number] = call.arguments
        self.size = sum(map(len, self.texts.values()))
        self.memo: dict[Hashable, Any] = {}
        """What policies derived from this message alone (see `MessageView.derive`)."""
        self._tokens: int | None = None
        self._text_tokens: dict[Where, int] = {}

    def text_tokens(self, where: Where, counter: TokenCounter) -> int:
        """Tokens of one text. One `FactsCache` has one counter, so this is kept."""
        count = self._text_tokens.get(where)
        if count is None:
            count = self._text_tokens[where] = counter.count(self.texts[where])
        return count

    def tokens(self, counter: TokenCounter) -> int:
        """Tokens of the whole message, framing included."""
        if self._tokens is None:
            names = sum(counter.count(call.name) for call in self.calls)
            fixed = sum(counter.count(call.arguments) for call in self.calls if not call.editable)
            texts = sum(self.text_tokens(where, counter) for where in self.texts)
            self._tokens = texts + names + fixed + counter.per_message + counter.per_opaque * self.opaque
        return self._tokens


class FactsCache:
    """Facts by the value of the message, those not seen for long dropped.

    ``max_chars`` bounds the text that is kept alive after the agent let go of it; while the agent holds its
    history the strings are the agent's own, not copies. Two generations, so that a hit costs one lookup: when the
    young one is full it becomes the old one, and what was not asked for since is dropped with the one before.
    """

    def __init__(self, counter: TokenCounter, *, max_chars: int = 64_000_000) -> None:
        self.counter = counter
        self._max_chars = max_chars // 2
        self._chars = 0
        self._young: dict[object, Facts] = {}
        self._old: dict[object, Facts] = {}

    def facts(self, messages: Sequence[Message], texts: Sequence[str] | None = None) -> list[Facts]:
        """The facts of each message. Not safe to call from two threads at once: the caller holds a lock.

        ``texts`` are the messages' JSON, where the caller has it: then nothing has to be looked at but that.
        """
        keys = map(message_key, messages) if texts is None else texts
        found = []
        for message, key in zip(messages, keys, strict=True):
            facts = self._young.get(key)
            if facts is None:
                facts = self._old.get(key) or Facts(message, key if texts is None else None)
                self._add(key, facts)
            found.append(facts)
        return found

    def _add(self, key: object, facts: Facts) -> None:
        if self._chars > self._max_chars:
            self._old, self._young, self._chars = self._young, {}, 0
        self._young[key] = facts
        self._chars += facts.size


def as_mapping(message: object) -> Message:
    """``message`` as a mapping: agents append the reply's own pydantic object to their history, as OpenAI allows."""
    if type(message) is dict or isinstance(message, Mapping):
        return message
    dump = getattr(message, "model_dump", None)
    if callable(dump):
        dumped = dump(mode="json", exclude_none=True)
        if isinstance(dumped, Mapping):
            return dumped
    raise TypeError(f"a message must be a mapping or have model_dump(), not {type(message).__name__}")


def message_key(message: Message) -> object:
    """A hashable value, equal for equal messages."""
    get = message.get
    role, content, calls = get("role"), get("content"), get("tool_calls")
    if type(content) is not str:
        content = _frozen(content)
    # Written out for the usual shapes because it runs for every message in every turn.
    if role == "tool":
        id, name = get("tool_call_id"), get("name")
        if type(id) is str and (name is None or type(name) is str):
            return (role, content, id, name)
    elif role == "assistant":
        if calls:
            calls = tuple([_call_key(call) for call in calls]) if type(calls) is list else _frozen(calls)
        reasoning, old = get("reasoning_content"), get("function_call")
        return (role, content, _frozen(reasoning), calls, _frozen(get("name")), _frozen(old))
    return tuple([_frozen(get(field)) for field in _FIELDS])


_FIELDS = ("role", "content", "tool_call_id", "name", "reasoning_content", "tool_calls", "function_call")


def _call_key(call: Any) -> object:
    if type(call) is dict and len(call) == 3:
        function, id, kind = call.get("function"), call.get("id"), call.get("type")
        if type(function) is dict and len(function) == 2:
            name, arguments = function.get("name"), function.get("arguments")
            if type(name) is type(arguments) is type(id) is type(kind) is str:
                return (id, kind, name, arguments)
    return (_frozen(call),)


def _frozen(value: object) -> object:
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is list or kind is tuple:
        return tuple([_frozen(one) for one in value])  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return tuple([(key, _frozen(one)) for key, one in value.items()])
    # The type stands beside other values because 1 == True would make different messages equal.
    return (kind.__name__, repr(value))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _opaque_blocks(content: object) -> int:
    if isinstance(content, str) or not isinstance(content, Sequence):
        return 0
    return sum(1 for block in content if not (isinstance(block, Mapping) and block.get("type") in TEXT_BLOCKS))


def _calls(message: Message) -> tuple[CallFacts, ...]:
    listed = message.get("tool_calls")
    calls: list[CallFacts] = []
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        for number, call in enumerate(listed):
            if not isinstance(call, Mapping):
                continue
            function = call.get("function")
            custom = call.get("custom")
            if isinstance(function, Mapping):
                arguments = function.get("arguments")
                editable = isinstance(arguments, str)
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True, default=str)
                calls.append(
                    CallFacts(number, _text(call.get("id")), _text(function.get("name")) or "", text, editable)
                )
            elif isinstance(custom, Mapping):
                text = _text(custom.get("input")) or ""
                calls.append(CallFacts(number, _text(call.get("id")), _text(custom.get("name")) or "", text, False))
    old = message.get("function_call")
    if not calls and isinstance(old, Mapping):
        calls.append(CallFacts(0, None, _text(old.get("name")) or "", _text(old.get("arguments")) or "", False))
    return tuple(calls)
