"""What the model wrote, put back where a framework wrote it differently.

Many frameworks parse a reply and write it anew when they send it back: JSON arguments lose their spaces, text loses a
newline at its end. The meaning is the same, the tokens are not, and the cache no longer fits from there on. Where the
replayed text means the same as the generated one, the generated one is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ._history import History, JsonWriter


class Generated:
    """The replies of one conversation, as far as a replay of them might differ."""

    def __init__(self) -> None:
        self._arguments: dict[str, list[str]] = {}
        self._aliases: dict[tuple[str, str], str] = {}
        self._contents: dict[str, str] = {}
        self._beside_calls: dict[str, str | None] = {}

    def note(self, message: Mapping[str, Any]) -> None:
        """Remember a reply's message."""
        content, calls = message.get("content"), _calls(message)
        if calls and (content is None or isinstance(content, str)):
            self._beside_calls[calls[0][0]] = content
        elif isinstance(content, str) and content.strip() not in {content, ""}:
            self._contents[content.strip()] = content
        for identity, arguments in calls:
            self._arguments.setdefault(identity, []).append(arguments)

    def restore(self, history: History) -> History:
        """The history with the model's own words in it; the same object where they all are."""
        if not self._arguments and not self._contents:
            return history
        messages, fragments = list(history.messages), list(history.fragments)
        changed = False
        for index, message in enumerate(messages):
            restored = self._restored(message) if message.get("role") == "assistant" else message
            if restored is not message:
                messages[index], fragments[index] = restored, JsonWriter().write(restored, f"messages[{index}]")
                changed = True
        return History(messages, fragments) if changed else history

    def _restored(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        restored: dict[str, Any] = {}
        pairs = _calls(message)
        content = message.get("content")
        generated = self._content(content, pairs)
        if generated != content:
            restored["content"] = generated
        written = [self._as_generated(identity, arguments) for identity, arguments in pairs]
        if any(text != arguments for text, (_, arguments) in zip(written, pairs, strict=True)):
            restored["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": text}}
                for call, text in zip(message["tool_calls"], written, strict=True)
            ]
        return {**message, **restored} if restored else message

    def _content(self, content: Any, calls: list[tuple[str, str]]) -> Any:
        """The generated text that ``content`` is, up to white space at its ends; else ``content``."""
        if calls and calls[0][0] in self._beside_calls and (content is None or isinstance(content, str)):
            # Models write blank lines before a call, which frameworks make into nothing.
            generated = self._beside_calls[calls[0][0]]
            return generated if (generated or "").strip() == (content or "").strip() else content
        return self._contents.get(content, content) if isinstance(content, str) else content

    def _as_generated(self, identity: str, arguments: str) -> str:
        generated = self._arguments.get(identity)
        if generated is None or arguments in generated:
            return arguments
        alias = self._aliases.get((identity, arguments))
        if alias is None:
            meant = _meaning(arguments)
            alias = next((text for text in generated if meant and _meaning(text) == meant), arguments)
            self._aliases[identity, arguments] = alias
        return alias


class MessageAssembler:
    """The messages of a streamed reply, put together from its deltas."""

    def __init__(self) -> None:
        self._contents: dict[int, list[str]] = {}
        self._calls: dict[tuple[int, int], dict[str, Any]] = {}

    def feed(self, chunk: Mapping[str, Any]) -> None:
        """Take one chunk in."""
        for choice in chunk.get("choices") or ():
            index, delta = choice.get("index", 0), choice.get("delta") or {}
            if delta.get("content"):
                self._contents.setdefault(index, []).append(delta["content"])
            for call in delta.get("tool_calls") or ():
                known = self._calls.setdefault((index, call.get("index", 0)), {"id": None, "arguments": []})
                known["id"] = call.get("id") or known["id"]
                known["arguments"].append((call.get("function") or {}).get("arguments") or "")

    def messages(self) -> list[dict[str, Any]]:
        """One message per choice."""
        result: dict[int, dict[str, Any]] = {
            index: {"content": "".join(texts), "tool_calls": []} for index, texts in self._contents.items()
        }
        for (index, _), call in self._calls.items():
            message = result.setdefault(index, {"content": None, "tool_calls": []})
            function = {"arguments": "".join(call["arguments"])}
            message["tool_calls"].append({"id": call["id"], "function": function})
        return list(result.values())


def _calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    calls = message.get("tool_calls")
    pairs: list[tuple[str, str]] = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(arguments, str):
            return []
        pairs.append((str(call.get("id")), arguments))
    return pairs


def _meaning(text: str) -> str | None:
    """JSON text in one spelling; None where it is no JSON. (Comparing parsed values would take 1 for true.)"""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return None
