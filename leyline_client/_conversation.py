"""What a session remembers of each conversation, and how it tells conversations apart."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ._edits import Message, part_text
from ._history import History, Relation, Standing, carry, relate
from ._models import Edit, Part
from ._replay import Generated


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation: its last history, its standing edits, and where its server session stands."""

    key: str | None = None
    """The name the caller gave it; None where it is recognised by its history."""
    session: str | None = None
    version: int = 0
    unanswered: int = 0
    """Turns sent whose reply was lost since ``version`` was known: the server may be that far ahead."""
    fragments: list[str] = field(default_factory=list)
    task: str = ""
    """The first user message, as JSON."""
    previous: int = 0
    """How many messages the turn before the last one sent; 0 where there was none."""
    turns: int = 0
    standing: tuple[Standing, ...] = ()
    """Standing edits, in the coordinates of the last history."""
    undone: set[Edit] = field(default_factory=set)
    """Edits taken back: a policy that plans them again is not followed."""
    freed: int = 0
    """Characters the standing edits leave out."""
    generated: Generated = field(default_factory=Generated)
    """What the model wrote, for where a framework replays it differently."""
    users: int = 0
    """Calls that hold or wait for ``lock``."""
    lock: Any = None
    stream: Any = None
    """The stream of the last turn, while it is not known to have ended."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The standing edits, in the coordinates of the last history."""
        return tuple(one.edit for one in self.standing)

    def forget_session(self) -> None:
        """The server does not know the session any more."""
        self.session, self.version, self.unanswered = None, 0, 0

    def relate(self, fragments: list[str]) -> tuple[Relation, int]:
        """How a history continues this conversation, and their common prefix in messages."""
        return relate(self.fragments, self.previous, fragments) if self.fragments else (Relation.EXTENSION, 0)

    def carried(self, fragments: list[str], prefix: int) -> tuple[Standing, ...]:
        """The standing edits in the coordinates of a new history."""
        return carry(self.standing, self.fragments, fragments, prefix)

    def sent(
        self, history: History, messages: Sequence[Message], carried: tuple[Standing, ...], new: Sequence[Edit]
    ) -> None:
        """The server accepted a turn: ``new`` edits of ``messages`` were added to the ``carried`` ones."""
        self.previous = len(self.fragments) if self.turns else 0
        self.turns += 1
        standing = (*carried, *(Standing(edit, self.turns) for edit in new))
        if standing != self.standing:
            self.freed = sum(freed_characters(messages[one.edit.message], one.edit) for one in standing)
        self.standing = standing
        self.fragments, self.task = history.fragments, history.task

    def took_back(self) -> None:
        """The server undid the last edit: the edits of the last editing turn stand no more."""
        last = max((one.turn for one in self.standing), default=0)
        self.undone |= {one.edit for one in self.standing if one.turn == last}
        self.standing = tuple(one for one in self.standing if one.turn != last)


def freed_characters(message: Message, edit: Edit) -> int:
    """Characters that ``edit`` leaves out of its message (negative where its replacement is longer)."""
    if edit.part is Part.MESSAGE:
        parts = [Part.CONTENT, Part.REASONING]
        calls = message.get("tool_calls") or ()
        texts = [part_text(message, part) for part in parts]
        texts += [part_text(message, Part.ARGUMENTS, call) for call in range(len(calls))]
        return sum(len(text) for text in texts if text)
    text = part_text(message, edit.part, edit.call) or ""
    end = len(text) if edit.end is None else edit.end
    return end - (edit.start or 0) - len(edit.replacement)


class Conversations:
    """All conversations of a session. Bounded; the least recently used one that is idle goes first."""

    def __init__(self, limit: int, lock_factory: Any) -> None:
        self._limit = limit
        self._new_lock = lock_factory
        self._order: OrderedDict[int, Conversation] = OrderedDict()
        self._by_key: dict[str, Conversation] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._order)

    def all(self) -> list[Conversation]:
        """Every conversation, least recently used first."""
        with self._guard:
            return list(self._order.values())

    def reserve(self, key: str | None, history: History) -> tuple[Conversation, list[Conversation]]:
        """The conversation a turn belongs to, counted as used until `release`, and those given up to make room.

        With a key it is that of the key. Without one it is the idle one whose last history the new one extends, or
        retries, or edits; else a new one, which takes over the edits of the beginning it shares with another.
        """
        with self._guard:
            found = self._named(key) if key is not None else self._recognised(history)
            found.users += 1
            self._order.move_to_end(id(found))
            return found, self._overflow()

    def release(self, conversation: Conversation) -> None:
        """A reserved conversation is idle again."""
        with self._guard:
            conversation.users -= 1

    def named(self, key: str) -> Conversation:
        """The conversation of ``key``, made where there is none."""
        with self._guard:
            return self._named(key)

    def drop(self, conversation: Conversation) -> None:
        """Forget a conversation."""
        with self._guard:
            self._order.pop(id(conversation), None)
            if conversation.key is not None:
                self._by_key.pop(conversation.key, None)

    def oldest_idle(self) -> Conversation | None:
        """The least recently used idle conversation that holds a session on the server."""
        with self._guard:
            return next((c for c in self._order.values() if not c.users and c.session is not None), None)

    def latest(self) -> Conversation | None:
        """The most recently used one."""
        with self._guard:
            return next(reversed(self._order.values()), None)

    def _named(self, key: str) -> Conversation:
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = self._add(Conversation(key=key))
        return found

    def _recognised(self, history: History) -> Conversation:
        fragments = history.fragments
        open_ones = [c for c in self._order.values() if c.key is None and c.fragments]
        ready = [c for c in open_ones if not _in_flight(c, fragments)]
        extended = [c for c in ready if fragments[: len(c.fragments)] == c.fragments]
        if extended:
            return max(extended, key=lambda c: len(c.fragments))
        related = [(c.relate(fragments), c) for c in open_ones]
        for wanted in (Relation.RETRY, Relation.EDITED):
            same = [(found, c) for found, c in related if c in ready and c.task == history.task]
            matching = [(prefix, c) for (relation, prefix), c in same if relation is wanted]
            if matching:
                return max(matching, key=lambda entry: entry[0])[1]
        fork = self._add(Conversation())
        (_, prefix), parent = max(related, key=lambda entry: entry[0][1], default=((None, 0), None))
        if parent is not None and prefix:
            fork.fragments = parent.fragments[:prefix]
            fork.generated = parent.generated
            fork.standing = tuple(one for one in parent.standing if one.edit.message < prefix)
        return fork

    def _add(self, conversation: Conversation) -> Conversation:
        conversation.lock = self._new_lock()
        self._order[id(conversation)] = conversation
        return conversation

    def _overflow(self) -> list[Conversation]:
        idle = [c for c in self._order.values() if not c.users]
        excess = idle[: max(0, len(self._order) - self._limit)]
        for conversation in excess:
            del self._order[id(conversation)]
            if conversation.key is not None:
                del self._by_key[conversation.key]
        return excess


def _in_flight(conversation: Conversation, fragments: list[str]) -> bool:
    """Whether a turn is under way that a new one with this history cannot be the successor of."""
    if conversation.users:
        return True
    # Who sends more than was sent has seen the reply, or given up on it.
    return conversation.stream is not None and len(fragments) <= len(conversation.fragments)
