"""``clear-thinking``: only the newest turns keep their reasoning."""

from __future__ import annotations

import re

from leyline_client.policy import Edit, MessageView, PolicyBase, Transcript

from ._fields import NaturalInt, PositiveInt, Strings


class ClearThinking(PolicyBase):
    """Anthropic's ``clear_thinking_20251015``, on the client: a pure deletion, no stub.

    Clears ``reasoning_content`` and, in text content, what stands between the given tags. Many chat templates drop
    earlier reasoning themselves; then there is nothing to edit and nothing happens.
    """

    name = "clear-thinking"
    summary = "Only the newest turns that hold reasoning keep it."
    origin = "Anthropic context editing"
    examples = ({"keep": 0}, {"keep": 1, "polling": 2})

    keep: NaturalInt = 1
    """Newest assistant messages with reasoning that keep it; the current turn keeps it anyway."""
    polling: PositiveInt = 1
    """Clear only when this many messages are due; more means fewer turns with edits."""
    tags: Strings = ("think",)
    """Tags around reasoning in text content."""

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Clears all reasoning but the newest."""
        thinking = [view for view in transcript.messages if view.role == "assistant" and self._thinks(view)]
        due = [view for view in thinking[: len(thinking) - self.keep] if not (view.protected or view.removed)]
        plans = [plan for view in due if (plan := self._clear(view))]
        return [edit for plan in plans for edit in plan] if len(plans) >= self.polling else []

    def _thinks(self, view: MessageView) -> bool:
        return bool(view.reasoning.strip() or self._tagged(view))

    def _clear(self, view: MessageView) -> list[Edit]:
        edits = view.clear_reasoning()
        for start, end in self._tagged(view):
            edits += view.cut(start, end)
        return edits

    def _tagged(self, view: MessageView) -> list[tuple[int, int]]:
        if "</" not in view.text:
            return []
        return view.derive(("clear-thinking", self.tags), lambda: self._find(view.text))

    def _find(self, text: str) -> list[tuple[int, int]]:
        tags = "|".join(map(re.escape, self.tags))
        matches = list(re.finditer(rf"<({tags})>(?P<inner>.*?)</\1>\s*", text, re.DOTALL))
        rest = re.sub(rf"<({tags})>.*?</\1>", "", text, flags=re.DOTALL)
        # A message that is nothing but reasoning keeps its tags, so that it is not left empty.
        spans = [match.span() if rest.strip() else match.span("inner") for match in matches]
        return [span for span in spans if span[0] < span[1]]
