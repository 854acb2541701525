"""The conversation as a policy sees it: a read-only view over the agent's messages and the edits that stand.

**Turns.** A turn begins with an assistant message (one that directly follows another assistant message
belongs to its turn) and holds everything up to the next one: tool results, what the user says. Turn 0 is what comes
before the first. A message's *age* is the number of turns that began after its own; age 0 is the **current turn**,
which the model has not answered yet. Assistant messages at the very end (a reply to be continued) begin no turn.

**Pairing.** A tool result answers the call of the same id in the nearest assistant message before it, because
agents do use an id twice. Without an id it answers the next unanswered call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from leyline_client._edits import Message
from leyline_client._models import Edit, Part

from ._facts import CallFacts, Facts, FactsCache, Where, as_mapping, message_key
from ._spans import Span, merged
from ._tokens import ESTIMATE, TokenCounter
from ._view import MessageView

_NONE: Mapping[Any, Any] = MappingProxyType({})


class Transcript(Sequence[MessageView]):
    """Messages with roles, tool names, arguments, ages, token counts, and what is already edited.

    ``standing`` are the edits issued in earlier turns, in the coordinates of ``messages``. ``token_counts``
    are exact counts per message (of the first ones, if fewer), as measured on the server's ``render``.
    ``attention`` holds, per message, the share of attention it got in each of the latest turns, newest last, where a
    server offers that.
    """

    def __init__(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        standing: Sequence[Edit] = (),
        counter: TokenCounter | None = None,
        token_counts: Sequence[int] | None = None,
        attention: Sequence[Sequence[float]] | None = None,
        cache: FactsCache | None = None,
        texts: Sequence[str] | None = None,
    ) -> None:
        self._cache = FactsCache(counter or ESTIMATE) if cache is None else cache
        self._raw: Sequence[Message] = messages if texts is not None else [as_mapping(message) for message in messages]
        self.tools: tuple[Mapping[str, Any], ...] = tuple(tools or ())
        self.attention = tuple(map(tuple, attention)) if attention is not None else None
        self._counts = tuple(token_counts or ())
        self.turn = 0
        """Number of the current turn: how many turns have begun."""
        self.task: int | None = None
        """Index of the newest user message, or None."""
        self.messages: tuple[MessageView, ...] = self._views(self._cache.facts(self._raw, texts))
        self._stand(tuple(standing))

    # -- building ----------------------------------------------------------------------------------------

    def _views(self, all_facts: list[Facts]) -> tuple[MessageView, ...]:
        views: list[MessageView] = []
        turn, before = 0, ""
        by_id: dict[str | None, tuple[MessageView, CallFacts]] = {}
        waiting: list[tuple[MessageView, CallFacts]] = []
        last = len(all_facts) - 1
        while last >= 0 and all_facts[last].role == "assistant":
            last -= 1
        for index, facts in enumerate(all_facts):
            role = facts.role
            if role == "assistant" and before != "assistant" and index < last:
                turn += 1
            elif role == "user":
                self.task = index
            before = role
            view = MessageView(self, index, facts, turn)
            views.append(view)
            if facts.calls:
                waiting = [(view, call) for call in facts.calls]
                for found in waiting:
                    by_id[found[1].id] = found
            elif facts.is_result:
                id = facts.tool_call_id
                answered = by_id.get(id) if id else (waiting[0] if waiting else None)
                if answered is None:
                    continue
                if answered in waiting:
                    waiting.remove(answered)
                caller, view.call = answered
                view.group = caller.index
                caller.answers += (index,)
        self.turn = turn
        return tuple(views)

    def _stand(self, standing: tuple[Edit, ...]) -> None:
        self.standing = standing
        """The edits that already stand, those of policies earlier in the list included."""
        self.removed: frozenset[int] = frozenset()
        self.covered: Mapping[tuple[int, Where], tuple[Span, ...]] = _NONE
        self._by_text: dict[tuple[int, Where], list[tuple[int, int, Edit]]] = {}
        self.touched: Set[int] = self.removed
        """Indices of the messages that carry standing edits."""
        self._freed: dict[int, int] = {}
        self._results: dict[tuple[str, str], list[MessageView]] | None = None
        if not standing:
            return
        removed, by_text, messages = set(), self._by_text, self.messages
        for edit in standing:
            index, part = edit.message, edit.part
            if index >= len(messages):
                continue
            if part is Part.MESSAGE:
                removed.add(index)
                continue
            where, end = (part, edit.call), edit.end
            if end is None:
                end = len(messages[index]._facts.texts.get(where, ""))
            span = (edit.start or 0, end, edit)
            key = (index, where)
            if key in by_text:
                by_text[key].append(span)
            else:
                by_text[key] = [span]
        self.removed = frozenset(removed)
        self.covered = {
            key: (group[0][:2],) if len(group) == 1 else merged(one[:2] for one in group)
            for key, group in by_text.items()
        }
        self.touched = removed.union([index for index, _ in by_text])

    # -- reading -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, index: Any) -> Any:
        return self.messages[index]

    def __iter__(self) -> Iterator[MessageView]:
        return iter(self.messages)

    @property
    def exact(self) -> bool:
        """False where some count is an estimate: no ``render`` counts for every message."""
        return len(self._counts) >= len(self.messages)

    @property
    def counter(self) -> TokenCounter:
        """What counts the tokens of a text."""
        return self._cache.counter

    @property
    def tokens(self) -> int:
        """Prompt tokens of messages and tool schemas with the standing edits carried out."""
        whole = sum(map(self.tokens_of, range(len(self.messages)))) + self.tools_tokens
        return whole - sum(map(self.freed_of, self.touched))

    @property
    def tools_tokens(self) -> int:
        """Tokens of the tool schemas: always counted on their JSON, which templates render in their own ways."""
        if not self.tools:
            return 0
        return self.counter.count(json.dumps(self.tools, sort_keys=True, default=str))

    def gain(self, edits: Sequence[Edit]) -> int:
        """Tokens that ``edits``, all new, take out of the prompt."""
        count, gained = self.counter.count, 0
        for edit in edits:
            if edit.part is Part.MESSAGE:
                gained += self.messages[edit.message].tokens_now
                continue
            where, facts = (edit.part, edit.call), self.messages[edit.message]._facts
            text, start = facts.texts[where], edit.start or 0
            end = len(text) if edit.end is None else edit.end
            whole = end - start == len(text)
            gained += facts.text_tokens(where, self.counter) if whole else count(text[start:end])
            gained -= count(edit.replacement)
        return gained

    @property
    def groups(self) -> tuple[tuple[MessageView, ...], ...]:
        """Messages that stay or go together: an assistant message with the results of its calls, else one alone."""
        return tuple(
            (view, *(self.messages[index] for index in view.answers))
            for view in self.messages
            if view.group == view.index
        )

    def results(self, min_age: int = 1) -> Iterator[MessageView]:
        """Tool results of at least ``min_age`` turns that are not removed, oldest first."""
        for view in self.messages:
            if view.turn > self.turn - min_age:
                return
            if view.is_result and view.index not in self.removed:
                yield view

    def asked_again(self, view: MessageView) -> bool:
        """Whether ``view`` is the newest result of a call whose earlier result was edited: the agent wanted it back.

        Policies that clear by age leave such results alone, lest the agent and they undo each other's work for ever.
        """
        if view.call is None or not self.standing:
            return False
        if self._results is None:
            self._results = {}
            for one in self.messages:
                if one.call is not None:
                    self._results.setdefault((one.call.name, one.call.arguments), []).append(one)
        same = self._results[view.call.name, view.call.arguments]
        return same[-1] is view and any(one.edited for one in same[:-1])

    def unchanged(self, messages: Sequence[Any]) -> bool:
        """Whether ``messages`` still are what the transcript was made of."""
        return len(messages) == len(self.messages) and all(
            message_key(as_mapping(message)) == view._facts.key
            for message, view in zip(messages, self.messages, strict=True)
        )

    def with_edits(self, edits: Sequence[Edit]) -> Transcript:
        """The same conversation with ``edits`` standing too."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.messages = tuple(_moved(view, other) for view in self.messages)
        other._stand((*self.standing, *edits))
        return other

    def raw_message(self, index: int) -> Message:
        """The agent's own message, not protected: for policies that only read, where `MessageView.raw` is too slow."""
        return self._raw[index]

    # -- for MessageView ---------------------------------------------------------------------------------

    def tokens_of(self, index: int) -> int:
        """Tokens of one message as the agent wrote it."""
        if index < len(self._counts):
            return self._counts[index]
        return self.messages[index]._facts.tokens(self._cache.counter)

    def freed_of(self, index: int) -> int:
        """Tokens that the standing edits take out of one message (negative where stubs are longer)."""
        freed = self._freed.get(index)
        if freed is None:
            freed = self._freed[index] = self._count_freed(index)
        return freed

    def _count_freed(self, index: int) -> int:
        if index in self.removed:
            return self.tokens_of(index)
        count, freed, facts = self._cache.counter.count, 0, self.messages[index]._facts
        for where in facts.texts:
            if (index, where) in self.covered:
                freed += facts.text_tokens(where, self._cache.counter) - count(self.text_now(index, where))
        return freed

    def text_now(self, index: int, where: Where, more: Sequence[Edit] = ()) -> str:
        """One text with the standing edits, and ``more`` of this text, carried out."""
        text = self.messages[index]._facts.texts.get(where, "")
        pieces, position = [], 0
        spans = [*self._by_text.get((index, where), ()), *(_span(edit, text) for edit in more)]
        for start, end, edit in sorted(spans, key=lambda one: one[:2]):
            pieces += [text[position:start], edit.replacement]
            position = end
        return "".join([*pieces, text[position:]])

    def stub_inside(self, index: int, where: Where, span: Span) -> bool:
        """Whether a standing edit left a non-empty stub within ``span`` of one text."""
        return any(
            edit.replacement and low >= span[0] and high <= span[1]
            for low, high, edit in self._by_text.get((index, where), ())
        )

    def inserted(self, key: tuple[int, Where], position: int) -> bool:
        """Whether a standing edit inserts at this character."""
        return any(low == high == position for low, high, _ in self._by_text.get(key, ()))


def _span(edit: Edit, text: str) -> tuple[int, int, Edit]:
    return edit.start or 0, len(text) if edit.end is None else edit.end, edit


def _moved(view: MessageView, transcript: Transcript) -> MessageView:
    other = MessageView(transcript, view.index, view._facts, view.turn)
    other.group, other.call, other.answers = view.group, view.call, view.answers
    return other
