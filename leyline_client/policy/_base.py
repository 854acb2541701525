"""What a policy is: the protocol, and the base class that makes one of a name, parameters and one method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from leyline_client._models import Edit

from ._transcript import Transcript


@runtime_checkable
class Policy(Protocol):
    """Decides which parts of a conversation are no longer worth attending to.

    ``plan`` must be pure (it changes nothing, least of all the messages), deterministic (the same transcript
    gives the same edits, byte for byte: no counters, no times, no random numbers) and cheap. It may ignore
    what already stands: the part of an edit that does is dropped.
    """

    @property
    def name(self) -> str:
        """Names the policy in errors and listings: lower case, digits and dashes."""

    def plan(self, transcript: Transcript) -> Sequence[Edit]:
        """The edits wanted for this turn, in the coordinates of the agent's own messages."""


class PolicyBase(BaseModel, ABC):
    """Base of policies whose parameters are validated fields.

    ::

        class DropOldLogs(PolicyBase):
            name = "drop-old-logs"
            summary = "Clears the output of the log tool after some turns."
            turns: int = Field(default=3, ge=1, description="Age from which logs go.")

            def plan(self, transcript):
                return [e for m in transcript.results(self.turns) if m.tool == "log" for e in m.clear("[old log]")]
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    """One sentence for listings."""
    origin: ClassVar[str] = ""
    """The system the policy and its parameter names come from."""
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Parameter sets with which it acts on small conversations too: what the test matrix runs it with."""
    removes_messages: ClassVar[bool] = False
    """True: may remove whole messages. Without it the number of messages must stay."""

    @abstractmethod
    def plan(self, transcript: Transcript) -> Sequence[Edit]:
        """The edits wanted for this turn (see `Policy.plan`)."""
