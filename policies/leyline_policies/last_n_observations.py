"""``last-n-observations``: only the newest n observations stay."""

from __future__ import annotations

from leyline_client.policy import Edit, MessageView, PolicyBase, Transcript

from ._fields import Names, PositiveInt, Strings, Stub, matches


class LastNObservations(PolicyBase):
    """SWE-agent's history processor of the same name.

    With ``polling`` p between n and n + p - 1 observations stay, and there is an edit only every p observations.
    """

    name = "last-n-observations"
    summary = "Only the newest n observations stay, updated every so many."
    origin = "SWE-agent"
    examples = ({"n": 1}, {"n": 2, "polling": 2, "always_keep": "bash", "always_remove": "run_tests", "stub": ""})

    n: PositiveInt = 5
    """Observations that stay at least."""
    polling: PositiveInt = 1
    """Observations between two updates."""
    always_keep: Names = ()
    """Tools whose observations always stay."""
    always_remove: Names = ()
    """Tools whose observations go as soon as their turn is over."""
    roles: Strings = ("tool", "function")
    """Roles of messages that are observations; add ``user`` for agents that report results as the user (the first
    user message, the task, never is one)."""
    stub: Stub = "Old environment output: ({lines} lines omitted)"
    """Stands for an observation; ``{lines}`` is its number of lines. Empty: a pure deletion that leaves the beginning
    of the first line."""

    def plan(self, transcript: Transcript) -> list[Edit]:
        """Clears what is no longer among the newest."""
        first_user = next((view.index for view in transcript.messages if view.role == "user"), None)
        seen = [view for view in transcript.messages if view.role in self.roles and view.index != first_user]
        counted = [view for view in seen if not matches(view.tool, self.always_remove)]
        old = {view.index for view in counted[: max(0, len(counted) // self.polling * self.polling - self.n)]}
        edits: list[Edit] = []
        for view in seen:
            if view.protected or view.edited or view.is_task or matches(view.tool, self.always_keep):
                continue
            removed = matches(view.tool, self.always_remove)
            if removed or (view.index in old and not transcript.asked_again(view)):
                edits += self._clear(view)
        return edits

    def _clear(self, view: MessageView) -> list[Edit]:
        lines = len(view.text.splitlines())
        return view.clear(self.stub.replace("{lines}", str(lines)))
