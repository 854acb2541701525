"""``clear-tool-uses``: beyond a trigger, all but the newest tool results are cleared."""

from __future__ import annotations

from leyline_client.policy import Edit, MessageView, PolicyBase, Transcript

from ._clearing import clearable, worthwhile
from ._fields import Names, NaturalInt, PositiveInt, Stub, matches


class ClearToolUses(PolicyBase):
    """Anthropic's ``clear_tool_uses_20250919``, on the client.

    ``clear_at_least`` is None by default there and here; here that means a tenth of the trigger, so that a
    conversation that cannot be brought below its trigger is not cleared anew in every turn.
    """

    name = "clear-tool-uses"
    summary = "Beyond a trigger, clears all tool results but the newest."
    origin = "Anthropic context editing"
    examples = ({"trigger": 200, "keep": 1}, {"trigger": 200, "keep": 0, "clear_tool_inputs": True, "stub": ""})

    trigger: PositiveInt = 100_000
    """Prompt tokens (as edited) at which clearing starts."""
    keep: NaturalInt = 3
    """Newest tool uses whose results stay, those of the current turn included."""
    clear_at_least: NaturalInt | None = None
    """Tokens one clearing must free, or it does not happen. None: a tenth of the trigger."""
    exclude_tools: Names = ()
    """Tools whose results are never cleared."""
    clear_tool_inputs: bool = False
    """Also empty the arguments of the cleared calls, down to ``{}`` (a pure deletion)."""
    stub: Stub = "[cleared]"
    """Stands for a cleared result. Empty: a pure deletion that leaves the beginning of the first line."""

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Clears once the trigger is reached."""
        if transcript.tokens < self.trigger:
            return []
        results = list(transcript.results(0))
        due = [view for view in results[: len(results) - self.keep] if self._may_clear(transcript, view)]
        plans = (self._clear(transcript, view) for view in due)
        return worthwhile(transcript, plans, self.trigger, self.clear_at_least)

    def _may_clear(self, transcript: Transcript, view: MessageView) -> bool:
        return clearable(transcript, view) and not matches(view.tool, self.exclude_tools)

    def _clear(self, transcript: Transcript, view: MessageView) -> list[Edit]:
        edits = view.clear(self.stub)
        if edits and self.clear_tool_inputs and view.call is not None and view.call.editable:
            edits = [*edits, *transcript.messages[view.group].clear_arguments(view.call.number)]
        return edits
