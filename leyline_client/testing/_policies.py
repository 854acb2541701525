"""A policy that does what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyline_client._models import Edit

from ._replies import ScriptExhausted, UnconsumedSteps


class ScriptedPolicy:
    """Plans one scripted step per turn, whatever the transcript holds.

    Each step is the edits of one turn, or an exception to raise. A turn without a step raises `ScriptExhausted`.
    Asked again about the same transcript (a policy set asks twice, to see that the answer stays), it repeats itself.

    Use it as a context manager, or call `check`, to have steps that were never planned raise `UnconsumedSteps`.
    """

    def __init__(self, steps: Sequence[Sequence[Edit] | Exception], *, name: str = "scripted") -> None:
        self.name = name
        self.transcripts: list[Any] = []
        """The transcript of every turn, in order."""
        self._steps = list(steps)
        self._last: Sequence[Edit] = ()

    def plan(self, transcript: Any) -> Sequence[Edit]:
        """The next step."""
        if self.transcripts and self.transcripts[-1] is transcript:
            return self._last
        self.transcripts.append(transcript)
        if not self._steps:
            raise ScriptExhausted(f"policy {self.name!r} has no step for turn {len(self.transcripts)}")
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        self._last = step
        return step

    def check(self) -> None:
        """Raise `UnconsumedSteps` where steps are left."""
        if self._steps:
            raise UnconsumedSteps(f"policy {self.name!r}: {len(self._steps)} steps were not planned")

    def __enter__(self) -> ScriptedPolicy:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.check()
