"""Agent-side SDK for KV cache directives.

Start with `LeylineSession` for an agent loop, `LeylineClient` for the bare protocol.
"""

from __future__ import annotations

from ._async_session import AsyncLeylineSession, AsyncSessionConversation
from ._client import AsyncLeylineClient, LeylineClient
from ._edits import apply_edits
from ._errors import (
    ConfigurationError,
    ExtensionMissing,
    HistoryEdited,
    InternalError,
    InvalidDirective,
    InvalidEdit,
    InvalidRequest,
    LeylineError,
    NothingToUndo,
    Overloaded,
    PayloadTooLarge,
    PolicyError,
    PolicyRegistrationError,
    PolicyRuleError,
    ProtocolError,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
    TooManySessions,
    TransportError,
    UnknownSession,
    Unsupported,
    UpstreamError,
    VersionConflict,
)
from ._models import (
    CompiledDirective,
    Directive,
    Edit,
    Executed,
    Mode,
    Part,
    PoolUse,
    Reason,
    Receipt,
    Segment,
    TurnInfo,
    TurnOptions,
)
from ._openai_client import openai_transport, openai_transport_async
from ._openai_types import leyline_of
from ._outcome import TurnResult
from ._session import LeylineSession, SessionConversation
from ._stats import SessionStats
from ._streams import AsyncChunkStream, ChunkStream
from ._turn import LeylineWarning
from ._version import __version__
from ._wire import PlanReply, RenderReply, ServerInfo, SessionView, SpliceReply, SpliceRequest, TokenizerInfo

__all__ = [
    "AsyncChunkStream",
    "AsyncLeylineClient",
    "AsyncLeylineSession",
    "AsyncSessionConversation",
    "ChunkStream",
    "CompiledDirective",
    "ConfigurationError",
    "Directive",
    "Edit",
    "Executed",
    "ExtensionMissing",
    "HistoryEdited",
    "InternalError",
    "InvalidDirective",
    "InvalidEdit",
    "InvalidRequest",
    "LeylineClient",
    "LeylineError",
    "LeylineSession",
    "LeylineWarning",
    "Mode",
    "NothingToUndo",
    "Overloaded",
    "Part",
    "PayloadTooLarge",
    "PlanReply",
    "PolicyError",
    "PolicyRegistrationError",
    "PolicyRuleError",
    "PoolUse",
    "ProtocolError",
    "Reason",
    "Receipt",
    "RenderReply",
    "Segment",
    "ServerError",
    "ServerInfo",
    "ServerTimeout",
    "ServerUnreachable",
    "SessionConversation",
    "SessionStats",
    "SessionView",
    "SpliceReply",
    "SpliceRequest",
    "TokenizerInfo",
    "TooManySessions",
    "TransportError",
    "TurnInfo",
    "TurnOptions",
    "TurnResult",
    "UnknownSession",
    "Unsupported",
    "UpstreamError",
    "VersionConflict",
    "__version__",
    "apply_edits",
    "leyline_of",
    "openai_transport",
    "openai_transport_async",
]
