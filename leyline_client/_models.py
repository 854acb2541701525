"""The vocabulary every hop speaks: policy, session, client, route, planner, graft.

Design §3. All models are frozen, refuse unknown fields, and take strict integers (``True`` and ``1.0``
are not ``1``). What travels over HTTP is exactly ``model_dump(mode="json")`` of these.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PROTOCOL_VERSION = 1
"""Version of the wire protocol under ``/leyline/v1``. A server answers with its own in ``info``."""

MAX_TOKENS = 1 << 24
"""Upper bound of any token position, count or id (the lineage key keeps 24 bits for the token id)."""
MAX_DIRECTIVES = 1024
"""Upper bound of directives, and of edits, in one request."""
MAX_REPLACEMENT_TOKENS = 65_536
"""Upper bound of tokens in one replacement."""
MAX_REPLACEMENT_CHARS = 1_000_000
"""Upper bound of characters in one message-level replacement."""

Position = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=MAX_TOKENS)]
Count = Annotated[int, Field(strict=True, ge=0)]
SessionId = Annotated[str, Field(min_length=16, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


class Mode(StrEnum):
    """What happens to the influence of the evicted text (seed: Leyline summary §2.1)."""

    AMORTIZE = "amortize"
    """Splice: tokens after the edit keep their KV, K rotated by Δ. The evicted text keeps its influence."""
    FORGET = "forget"
    """Re-prefill from the first edited position: nothing computed after it is reused."""


class Model(BaseModel):
    """Base of everything on the wire: frozen, closed, validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Directive(Model):
    """Replace tokens ``[start, end)`` of the source by ``replacement`` (the paper's 4-tuple, §2.1).

    ``start == end`` inserts, an empty replacement deletes. Directives of one batch are all in source
    coordinates: none is shifted by the ones before it.
    """

    start: Position
    end: Position
    replacement: Annotated[tuple[TokenId, ...], Field(max_length=MAX_REPLACEMENT_TOKENS)] = ()
    mode: Mode = Mode.AMORTIZE

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end < self.start:
            raise ValueError(f"end ({self.end}) lies before start ({self.start})")
        if self.start == self.end and not self.replacement:
            raise ValueError("an empty span with an empty replacement changes nothing")
        return self

    @property
    def delta(self) -> int:
        """How far tokens after the span move: ``len(replacement) - (end - start)``."""
        return len(self.replacement) - (self.end - self.start)


class Part(StrEnum):
    """Which text of a message an edit touches."""

    CONTENT = "content"
    """The message's text content (of block content: the text blocks, joined)."""
    ARGUMENTS = "arguments"
    """The argument string of tool call number ``call`` of an assistant message."""
    REASONING = "reasoning"
    """The ``reasoning_content`` of an assistant message."""
    MESSAGE = "message"
    """The whole message, removed. Declared by few policies: pairing of tool calls must survive it."""


class Edit(Model):
    """The message-level form of a directive: replace characters ``[start, end)`` of one part of one message.

    ``message`` is the index into the request's ``messages`` as the agent wrote them. ``start`` and ``end``
    count characters (``None``: from the beginning, to the end). The server compiles edits to directives,
    because only it knows the chat template and the tokens in the cache.
    """

    message: Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
    replacement: Annotated[str, Field(max_length=MAX_REPLACEMENT_CHARS)] = ""
    part: Part = Part.CONTENT
    call: Annotated[int, Field(strict=True, ge=0, le=1_000)] = 0
    start: Position | None = None
    end: Position | None = None
    mode: Mode = Mode.AMORTIZE

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.start is not None and self.end is not None and self.end < self.start:
            raise ValueError(f"end ({self.end}) lies before start ({self.start})")
        if self.part is Part.MESSAGE and (self.replacement or self.start is not None or self.end is not None):
            raise ValueError("an edit that removes a message takes no replacement and no span")
        if self.call and self.part is not Part.ARGUMENTS:
            raise ValueError("call is only meaningful with part='arguments'")
        return self


class Executed(StrEnum):
    """What the server really did for a turn."""

    APPEND = "append"
    """Nothing before the end of the cached state changed."""
    AMORTIZE = "amortize"
    """Every edit was spliced."""
    FORGET = "forget"
    """Everything from the first forgotten position was prefilled again, as asked."""
    MIXED = "mixed"
    """Some edits were spliced, then a forget re-prefilled the rest, as asked."""
    REPREFILL = "reprefill"
    """A splice was asked for and did not (wholly) happen: right, only slower. ``Receipt.reason`` says why."""


class Reason(StrEnum):
    """Why something else happened than was asked. A closed list."""

    SOURCE_NOT_CACHED = "source_not_cached"
    SOURCE_PARTIALLY_CACHED = "source_partially_cached"
    POOL_EXHAUSTED = "pool_exhausted"
    REPLACEMENT_NOT_CACHED = "replacement_not_cached"
    TAIL_TOO_SHORT = "tail_too_short"
    VETOED = "vetoed"
    NEW_SESSION = "new_session"
    SESSION_RECOVERED = "session_recovered"
    UNSUPPORTED_SERVER = "unsupported_server"
    UNSUPPORTED_REQUEST = "unsupported_request"
    INTERNAL_ERROR = "internal_error"


class Segment(Model):
    """A maximal run of target positions whose KV came from one run of source positions at one Δ."""

    start: Position
    end: Position
    delta: Annotated[int, Field(strict=True, ge=-MAX_TOKENS, le=MAX_TOKENS)]
    """Rotation applied to the copied K, in positions, counted from the source really used."""
    generation: Count = 0
    """How often this KV has been rotated since it was prefilled, this splice included (1: from pristine KV)."""


class CompiledDirective(Model):
    """A directive as executed, without token ids."""

    start: Position
    end: Position
    replacement_tokens: Count
    mode: Mode
    declared: bool = True
    """False: the agent changed its own history and ``on_history_edit`` gave the mode."""


class PoolUse(Model):
    """KV pool slots: ``free + cached + held == total``. ``held`` is locked by running requests."""

    total: Count
    free: Count
    cached: Count
    held: Count


class Receipt(Model):
    """What really happened to the KV cache in one turn. Counts are tokens, times are milliseconds.

    ``cached_tokens + prefilled_tokens == prompt_tokens``. Never holds prompt text or token ids.
    """

    requested: Mode | Literal["mixed", "none"] = "none"
    executed: Executed = Executed.APPEND
    reason: Reason | None = None
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    """Prompt tokens whose KV was reused, rotated ones included."""
    rotated_tokens: Count = 0
    """Of the cached ones: K turned to a new position for this turn, now or by an equal edit whose KV is shared."""
    prefilled_tokens: Count = 0
    """Prompt tokens computed in this turn: new tail, replacements, and the one token an engine always recomputes."""
    replacement_tokens: Count = 0
    """Of the prefilled ones: in internal prefills of replacements."""
    influenced_tokens: Count = 0
    """Prompt tokens at or after the first amortized edit: their KV may carry evicted text's influence."""
    drift_tokens: Count = 0
    """Tokens of the last reply that the template rendered differently from how they were generated."""
    dropped_tokens: Count = 0
    """Forget's certificate: cached tokens holding the span, or below it, dropped from the tree."""
    kept_by_others: Count = 0
    """Forget's certificate: such tokens that a running request or another history still holds."""
    slots_allocated: Count = 0
    slots_released: Count = 0
    generation: Count = 0
    """Highest rotation generation among ``segments`` (0: nothing was rotated)."""
    segments: tuple[Segment, ...] = ()
    directives: tuple[CompiledDirective, ...] = ()
    graft_ms: Annotated[float, Field(ge=0)] = 0.0
    pool_before: PoolUse | None = None
    pool_after: PoolUse | None = None


class TurnInfo(Model):
    """The ``leyline`` object of a reply: where the session stands and what the turn cost."""

    session: SessionId
    version: Count
    receipt: Receipt


class TurnOptions(Model):
    """The ``leyline`` object of a request.

    ``edits`` and ``directives`` stand for the whole conversation: each turn carries all that are still
    wanted, against the full unedited ``messages`` (directives: against the tokens these render to).
    """

    session: SessionId | None = None
    """None starts a session; the reply names it."""
    expected_version: Count | None = None
    """Compare-and-swap: refused with ``version_conflict`` unless the session stands there."""
    edits: Annotated[tuple[Edit, ...], Field(max_length=MAX_DIRECTIVES)] = ()
    directives: Annotated[tuple[Directive, ...], Field(max_length=MAX_DIRECTIVES)] = ()
    on_history_edit: Literal["amortize", "forget", "error"] = "forget"
    keep_source: bool = Field(default=False, strict=True)
    """Keep the KV before the edit cached, so that ``undo`` needs no prefill (memory until its TTL ends)."""
    veto_unprofitable: bool = Field(default=False, strict=True)
    """Let the server answer an edit that costs more than it saves with a plain append of the unedited history."""
    purge: bool = Field(default=False, strict=True)
    """Also forget everything evicted earlier by amortize: re-prefill from the first influenced token."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.edits and self.directives:
            raise ValueError("give edits or directives, not both")
        return self


def check_directives(directives: tuple[Directive, ...] | list[Directive], source_length: int) -> None:
    """Check a batch against its source: in order, disjoint, within ``[0, source_length]``.

    Two directives may touch, but not insert at the same place, where their order would decide the text.

    Raises:
        ValueError: naming the index of the first directive at fault.
    """
    last_end, last_start = 0, -1
    for index, directive in enumerate(directives):
        if directive.end > source_length:
            raise ValueError(
                f"directives[{index}].end: {directive.end} lies beyond the source's {source_length} tokens"
            )
        if directive.start < last_end or directive.start == last_start:
            raise ValueError(
                f"directives[{index}].start: {directive.start} overlaps or precedes directives[{index - 1}]"
            )
        last_end, last_start = directive.end, directive.start


def apply_directives(source: list[int], directives: tuple[Directive, ...] | list[Directive]) -> list[int]:
    """The target tokens: ``source`` with every directive carried out. Raises ValueError like `check_directives`."""
    check_directives(directives, len(source))
    target: list[int] = []
    position = 0
    for directive in directives:
        target += source[position : directive.start]
        target += directive.replacement
        position = directive.end
    return target + source[position:]
