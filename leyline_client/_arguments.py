"""The arguments of ``chat.completions.create``: read once, kept as they are, written as one request body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._errors import ConfigurationError
from ._history import History, JsonWriter
from ._http import DEFAULT_TIMEOUT, Request, Timeout, as_timeout

CONVERSATION_HEADER = "x-leyline-conversation"
"""Names the conversation a request belongs to, for callers that can only set headers. Not passed on."""

_OPTIONS = {"directives", "keep_source", "on_history_edit", "purge", "veto_unprofitable"}
"""What one turn may say for itself in ``extra_body={"leyline": {...}}``; the rest is the session's."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call of ``create``. ``fields`` are all OpenAI and engine arguments but the messages, untouched."""

    history: History
    fields: Mapping[str, Any]
    stream: bool
    key: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    timeout: Timeout = field(default_factory=lambda: DEFAULT_TIMEOUT)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools offered to the model."""
        tools = self.fields.get("tools")
        return tools if isinstance(tools, Sequence) else None

    def build(self, path: str, fragments: Sequence[str], tail: str, extra: Mapping[str, Any]) -> Request:
        """The HTTP request: the body is put together from the messages' own JSON, not written again."""
        head = JsonWriter().write({**self.fields, **extra}, "the request")
        # One long string and its bytes, no more copies: at this size each costs as much as many messages.
        pieces = [head[:-1], ',"messages":[', fragments[0]]
        for fragment in fragments[1:]:
            pieces += (",", fragment)
        pieces += ("]", tail, "}")
        content = "".join(pieces)
        headers = {"content-type": "application/json", **self.headers}
        return Request("POST", path, content.encode(), headers, self.query, self.timeout, self.stream)


def read_arguments(arguments: Mapping[str, Any], key: str | None = None) -> ChatRequest:
    """Sort the keyword arguments of ``create``.

    Raises:
        ConfigurationError: messages are missing, or something cannot be sent.
    """
    given = {name: value for name, value in arguments.items() if not _omitted(value)}
    headers = {name.lower(): str(value) for name, value in (given.pop("extra_headers", None) or {}).items()}
    query = given.pop("extra_query", None) or {}
    body = given.pop("extra_body", None) or {}
    timeout = as_timeout(given.pop("timeout")) if "timeout" in given else DEFAULT_TIMEOUT
    if not isinstance(body, Mapping):
        raise ConfigurationError("extra_body must be a mapping")
    given.update(body)
    options = _options(given.pop("leyline", None))
    if "messages" not in given:
        raise ConfigurationError("messages is missing")
    history = JsonWriter().read(given.pop("messages"))
    tools = given.get("tools")
    if tools is not None and not isinstance(tools, list):
        # A one-shot iterable would be used up by the first attempt.
        given["tools"] = list(tools) if isinstance(tools, Iterable) else tools
    given["stream"] = bool(given.get("stream"))
    named = headers.pop(CONVERSATION_HEADER, None)
    return ChatRequest(history, given, given["stream"], key or named, options, headers, query, timeout)


def _options(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError("leyline must be a mapping")
    if unknown := set(given) - _OPTIONS:
        names = ", ".join(sorted(map(str, unknown)))
        raise ConfigurationError(f"leyline: a turn of a session cannot set {names}, only {', '.join(sorted(_OPTIONS))}")
    return dict(given)


def _omitted(value: object) -> bool:
    """Whether ``value`` is one of the openai package's "not given" marks."""
    kind = type(value)
    return kind.__name__ in {"NotGiven", "Omit"} and kind.__module__.partition(".")[0] == "openai"
