"""A toy tokenizer and a ChatML-like template: small, exact, and with a span for every text of every message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyline_client._edits import part_text
from leyline_client._models import Part
from leyline_client._wire import PartSpan

Message = Mapping[str, Any]
Owner = tuple[int, Part | None, int]
"""(message, part, tool call) that a piece of text belongs to; part None: the template's own text around it."""

_TOKEN = re.compile(r"<\|\w+\|>|\w+|\s|[^\w\s]")


class ToyTokenizer:
    """One token per word, whitespace character or punctuation mark; ids are given out in order of appearance."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        return [self._id(token) for token in _TOKEN.findall(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; an id never given out reads ``<?>``."""
        return "".join(self._texts[i] if i < len(self._texts) else "<?>" for i in ids)

    def _id(self, token: str) -> int:
        number = self._ids.get(token)
        if number is None:
            number = self._ids[token] = len(self._texts)
            self._texts.append(token)
        return number


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens with one owner (None: generation prompt, tools)."""

    tokens: tuple[int, ...]
    owner: Owner | None = None


class ToyTemplate:
    """Messages to pieces, and a reply's message to the pieces the next turn renders it to."""

    def __init__(self, tokenizer: ToyTokenizer) -> None:
        self.tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        generation_prompt: bool = True,
        numbers: Sequence[int] | None = None,
    ) -> list[Piece]:
        """The prompt in pieces. ``numbers``: the owner index of each message, where some have been removed."""
        pieces = [self._piece(f"<|tools|>{json.dumps(list(tools))}\n")] if tools else []
        for index, message in enumerate(messages):
            number = index if numbers is None else numbers[index]
            pieces.append(self._piece(f"<|start|>{message.get('role', 'user')}\n", (number, None, 0)))
            pieces += self._body(message, number)
            pieces.append(self._piece("\n", (number, None, 0)))
        if generation_prompt:
            pieces.append(self._piece("<|start|>assistant\n"))
        return [piece for piece in pieces if piece.tokens]

    def reply(self, message: Message) -> list[Piece]:
        """What the model generates for ``message``, its end token included."""
        return [piece for piece in self._body(message, -1) if piece.tokens]

    def _body(self, message: Message, number: int) -> list[Piece]:
        pieces: list[Piece] = []
        if reasoning := part_text(message, Part.REASONING):
            pieces += [
                self._piece("<|think|>", (number, None, 0)),
                self._piece(reasoning, (number, Part.REASONING, 0)),
            ]
        if text := part_text(message, Part.CONTENT):
            pieces.append(self._piece(text, (number, Part.CONTENT, 0)))
        content = message.get("content")
        opaque = [] if content is None or isinstance(content, str) else [b for b in content if "text" not in b]
        pieces += [self._piece("<|image|>", (number, None, 0)) for _ in opaque]
        for call, tool_call in enumerate(message.get("tool_calls") or ()):
            function = tool_call.get("function") or {}
            pieces.append(self._piece(f"<|call|>{function.get('name')} ", (number, None, call)))
            pieces.append(self._piece(part_text(message, Part.ARGUMENTS, call) or "", (number, Part.ARGUMENTS, call)))
        pieces.append(self._piece("<|end|>", (number, None, 0)))
        return pieces

    def _piece(self, text: str, owner: Owner | None = None) -> Piece:
        return Piece(tuple(self.tokenizer.encode(text)), owner)


def flatten(pieces: Iterable[Piece]) -> list[int]:
    """The tokens of all pieces."""
    return [token for piece in pieces for token in piece.tokens]


def cut(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """The pieces of tokens ``[start, end)``, those at the ends cut."""
    result: list[Piece] = []
    position = 0
    for piece in pieces:
        low, high = max(start - position, 0), min(end - position, len(piece.tokens))
        if low < high:
            result.append(Piece(piece.tokens[low:high], piece.owner))
        position += len(piece.tokens)
    return result


def part_spans(pieces: Sequence[Piece]) -> tuple[PartSpan, ...]:
    """Where every text of every message is."""
    spans: list[PartSpan] = []
    position = 0
    for piece in pieces:
        end = position + len(piece.tokens)
        if piece.owner is not None and piece.owner[1] is not None:
            message, part, call = piece.owner
            spans.append(PartSpan(message=message, part=part, call=call, start=position, end=end))
        position = end
    return tuple(spans)
