"""``truncate-older-than-n``: long tool outputs keep head and tail once they are older than n turns."""

from __future__ import annotations

from pydantic import Field

from leyline_client.policy import Edit, MessageView, PolicyBase, Transcript

from ._fields import Names, NaturalInt, PositiveInt, Stub, matches


class TruncateOlderThanN(PolicyBase):
    """The rule of the Leyline paper. Only the middle goes, so head and tail keep their KV."""

    name = "truncate-older-than-n"
    summary = "Long tool outputs keep only head and tail once they are older than n turns."
    origin = "Leyline paper"
    examples = ({"n": 1, "max_chars": 40}, {"n": 1, "max_chars": 0, "stub": "", "polling": 2})

    n: PositiveInt = 2
    """The newest ``n`` turns keep their tool outputs whole, the current one included."""
    max_chars: NaturalInt = 200
    """Outputs longer than this are truncated to about this many characters, half of them from each end."""
    stub: Stub = "\n[... truncated ...]\n"
    """Stands for the middle. Empty: a pure deletion."""
    polling: PositiveInt = 1
    """Truncate only when this many outputs are due; more means fewer turns with edits."""
    exclude_tools: Names = ()
    """Tools whose outputs stay whole."""
    snap: NaturalInt = Field(default=40)
    """Cut at the end of a line or word if one is within this many characters; tokens are then less often broken."""

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Truncates what is due."""
        plans = [plan for view in transcript.results(self.n) if (plan := self._truncate(transcript, view))]
        return [edit for plan in plans for edit in plan] if len(plans) >= self.polling else []

    def _truncate(self, transcript: Transcript, view: MessageView) -> list[Edit]:
        text = view.text
        if len(text) <= self.max_chars + len(self.stub) or view.edited or matches(view.tool, self.exclude_tools):
            return []
        if transcript.asked_again(view):
            return []
        head = _snap_down(text, self.max_chars - self.max_chars // 2, self.snap)
        tail = _snap_up(text, len(text) - self.max_chars // 2, self.snap)
        if head == 0 and tail == len(text) and not self.stub:
            return view.clear()
        return view.cut(head, tail, self.stub)


def _snap_down(text: str, position: int, reach: int) -> int:
    for mark in ("\n", " "):
        found = text.rfind(mark, max(position - reach, 0), position)
        if found > 0:
            return found
    return position


def _snap_up(text: str, position: int, reach: int) -> int:
    for mark in ("\n", " "):
        found = text.find(mark, position, position + reach)
        if found >= 0:
            return found
    return position
