"""Histories as the agent sends them: written to JSON once, compared cheaply, aligned where the agent changed them.

A message is compared by its JSON text. That text is also what is sent, so an unchanged history costs one pass of the
JSON encoder per turn, and a dict the agent changes in place is still seen to have changed.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ._errors import ConfigurationError
from ._models import Edit, Part


@dataclass(frozen=True, slots=True)
class History:
    """Messages and the JSON text of each."""

    messages: Sequence[Mapping[str, Any]]
    fragments: list[str]

    @property
    def task(self) -> str:
        """The first user message: what two conversations do not share, however alike their tools answer."""
        pairs = zip(self.messages, self.fragments, strict=True)
        return next((fragment for message, fragment in pairs if message.get("role") == "user"), self.fragments[0])


class JsonWriter:
    """Writes what OpenAI's client accepts: also pydantic objects (a reply's message put back into the history).

    Make one per use: it is cheap, and not thread-safe.
    """

    def __init__(self) -> None:
        self._converted = False
        self._encode = _encoding(json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=self._convert))

    def write(self, value: Any, what: str) -> str:
        """``value`` as JSON. Raises `ConfigurationError`, naming ``what``, where it cannot be."""
        try:
            return self._encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise _unwritable(what, error) from error

    def read(self, messages: Iterable[Any]) -> History:
        """The history, its messages plain dicts."""
        if isinstance(messages, str | bytes | Mapping):
            raise ConfigurationError("messages must be a list of messages")
        plain: list[Mapping[str, Any]] = []
        fragments: list[str] = []
        encode = self._encode
        self._converted = False
        for message in messages:
            try:
                fragment = encode(message)
            except (TypeError, ValueError, RecursionError) as error:
                raise _unwritable(f"messages[{len(plain)}]", error) from error
            if self._converted or type(message) is not dict:
                self._converted = False
                message = json.loads(fragment)
                if not isinstance(message, dict):
                    raise ConfigurationError(f"messages[{len(plain)}] is no message but a {type(message).__name__}")
            plain.append(message)
            fragments.append(fragment)
        if not plain:
            raise ConfigurationError("messages is empty")
        return History(plain, fragments)

    def _convert(self, value: Any) -> Any:
        self._converted = True
        dump = getattr(value, "model_dump", None)
        if callable(dump) and not isinstance(value, type):
            return dump(mode="json", exclude_unset=True, by_alias=True)
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
            return list(value)
        raise TypeError(f"a {type(value).__name__} has no JSON form")


def _unwritable(what: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"{what} cannot be written as JSON: {error}")


def _encoding(encoder: json.JSONEncoder) -> Callable[[Any], str]:
    """``encoder.encode`` without what it sets up anew for each value: as much work as writing a short message."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    separators = (encoder.key_separator, encoder.item_separator)
    options = (encoder.sort_keys, encoder.skipkeys, encoder.allow_nan)
    try:
        chunks = make({}, encoder.default, json.encoder.encode_basestring_ascii, encoder.indent, *separators, *options)
    except TypeError:  # another Python's idea of the same thing
        return encoder.encode
    return lambda value: "".join(chunks(value, 0))


class Relation(Enum):
    """What a new history is to the one a conversation sent last."""

    EXTENSION = "extension"
    """All of it, and perhaps more."""
    RETRY = "retry"
    """The same up to the last turn, which is dropped or different."""
    EDITED = "edited"
    """Something earlier changed, and some of what followed is still there: the agent edits its own history."""
    FORK = "fork"
    """Another continuation of a common beginning, or another conversation altogether."""


def common_prefix(a: list[str], b: list[str]) -> int:
    """How many messages the two begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        # Slices compare in C; a loop over messages would cost more than all the rest of a turn.
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def relate(old: list[str], previous: int, new: list[str]) -> tuple[Relation, int]:
    """How ``new`` continues ``old``, and their common prefix in messages.

    ``previous`` is how many messages the turn before ``old`` sent, 0 where ``old`` was the first.

    A history counts as edited when, after the first difference, messages of the old one are still there, and with them
    half of the old history, or a quarter and its last message; three at least, because two agents may well share a
    task's text.
    """
    prefix = common_prefix(old, new)
    if prefix == len(old):
        return Relation.EXTENSION, prefix
    if previous and prefix >= previous:
        return Relation.RETRY, prefix
    kept = (Counter(old) & Counter(new)).total()
    needed = len(old) / 4 if old[-1] in new else len(old) / 2
    if kept > prefix and kept >= max(needed, 3):
        return Relation.EDITED, prefix
    return Relation.FORK, prefix


@dataclass(frozen=True, slots=True)
class Standing:
    """An edit that stands, and the number of the turn that issued it."""

    edit: Edit
    turn: int


def carry(standing: Sequence[Standing], old: list[str], new: list[str], prefix: int) -> tuple[Standing, ...]:
    """The edits that still hold: those of messages that are still there, at their new index.

    Edits that remove messages hold together or not at all: the rest of a removed tool exchange must not stay behind.
    """
    if all(one.edit.message < prefix for one in standing):
        return tuple(standing)
    moved = {index: index for index in range(prefix)}
    matcher = difflib.SequenceMatcher(None, old[prefix:], new[prefix:], autojunk=False)
    for a, b, size in matcher.get_matching_blocks():
        moved.update((prefix + a + i, prefix + b + i) for i in range(size))
    kept = [one for one in standing if one.edit.message in moved]
    if any(one.edit.part is Part.MESSAGE for one in standing if one.edit.message not in moved):
        kept = [one for one in kept if one.edit.part is not Part.MESSAGE]
    return tuple(replace(one, edit=_at(one.edit, moved[one.edit.message])) for one in kept)


def _at(edit: Edit, message: int) -> Edit:
    return edit if edit.message == message else edit.model_copy(update={"message": message})
