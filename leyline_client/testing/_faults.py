"""What can go wrong on the way, and a reply before it is bytes on a wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """What can go wrong with one request."""

    REFUSE = "refuse"
    """The connection is refused: nothing was done."""
    DROP_REPLY = "drop_reply"
    """The turn is carried out, and the connection breaks before its reply."""
    TIMEOUT = "timeout"
    """The turn is carried out, and no reply comes in time."""
    CUT_STREAM = "cut_stream"
    """The turn is carried out, and its stream breaks in the middle."""
    LOSE_SESSIONS = "lose_sessions"
    """The server has forgotten all sessions before the request."""
    OVERLOADED = "overloaded"
    """503: nothing was done."""


@dataclass(frozen=True, slots=True)
class FakeReply:
    """A reply before it is bytes on a wire."""

    status: int
    body: bytes | Iterator[bytes]
    content_type: str = "application/json"


class FaultRaised(Exception):
    """How a fault reaches the transport that mimics it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault
