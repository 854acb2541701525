"""Bodies of the routes that are not OpenAI's: what ``docs/protocol.md`` tabulates, as models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ._models import (
    MAX_DIRECTIVES,
    MAX_TOKENS,
    Count,
    Directive,
    Edit,
    Mode,
    Model,
    Part,
    Position,
    Receipt,
    SessionId,
    TokenId,
    TurnInfo,
)


class Limits(Model):
    """What one request, and one server, may hold."""

    max_directives: Count
    max_tokens: Count
    max_sessions: Count
    session_ttl_s: Annotated[float, Field(gt=0)]


class RopeInfo(Model):
    """How the served model encodes positions."""

    kind: Literal["mla", "mha"]
    rotary_dim: Count
    interleaved: bool
    layers: Count
    nope_layers: Count
    scaling: str | None = None


class ServerInfo(Model):
    """``GET info``."""

    protocol: Count
    extension_version: str
    sglang_version: str
    model: str
    enabled: bool
    """False: the extension is loaded but refuses to splice on this server; ``refusals`` says why."""
    refusals: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ()
    page_size: Count
    context_length: Count
    vocab_size: Count
    kv_dtype: str
    rope: RopeInfo | None = None
    limits: Limits
    fidelity: dict[str, Any] | None = None
    """What is known of amortize's fidelity on this model, from a ``fidelity.json`` card; None: not measured."""


class TokenizerInfo(Model):
    """``GET tokenizer``: which byte-level BPE vocabulary the server counts with."""

    kind: Literal["byte_level_bpe"] = "byte_level_bpe"
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of what ``GET tokenizer/{digest}`` answers: equal for equal vocabularies, whatever the model's name."""
    size: Count
    """Bytes of that answer."""


class RenderRequest(Model):
    """``POST render``."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    edits: Annotated[tuple[Edit, ...], Field(max_length=MAX_DIRECTIVES)] = ()
    return_token_ids: bool = True


class PartSpan(Model):
    """Where one text of one message ended up in the tokens, half-open. A text the template changed has none."""

    message: Count
    part: Part
    call: Count = 0
    start: Position
    end: Position


class RenderReply(Model):
    """Token ids of the rendered messages and the span of every text that the template renders verbatim."""

    prompt_tokens: Count
    token_ids: list[int] | None = None
    spans: tuple[PartSpan, ...] = ()
    exact: bool = True
    """False: the template changed some text, whose span is missing."""


class PlanReply(Model):
    """``POST plan``: the receipt a turn would get now, and whether its edits pay."""

    receipt: Receipt
    worth_it: bool
    saved_prefill_tokens: Annotated[int, Field(ge=-MAX_TOKENS)]
    """Prefill avoided in this turn against re-prefilling the edited history; negative: the edit costs more."""
    splice_ms: float | None = None
    reprefill_ms: float | None = None
    """Predicted from rates measured on this server; None before anything was measured."""


class SpliceRequest(Model):
    """``POST splice``: token-level turn."""

    session: SessionId | None = None
    expected_version: Count | None = None
    directives: Annotated[tuple[Directive, ...], Field(max_length=MAX_DIRECTIVES)] = ()
    append: Annotated[tuple[TokenId, ...], Field(max_length=MAX_TOKENS)] = ()
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    return_logprob: bool = Field(default=False, strict=True)
    top_logprobs_num: Annotated[int, Field(strict=True, ge=0, le=100)] = 0
    cache_salt: str | None = None
    keep_source: bool = Field(default=False, strict=True)
    purge: bool = Field(default=False, strict=True)


class SpliceReply(TurnInfo):
    """Answer of ``POST splice``."""

    output_ids: list[int]
    text: str = ""
    finish_reason: str | None = None
    meta: dict[str, Any] = Field(default_factory=dict)


class SessionRequest(Model):
    """Body of ``POST sessions/{id}/undo`` and ``/purge``; may be missing."""

    expected_version: Count | None = None


class SessionView(Model):
    """``GET sessions/{id}``."""

    session: SessionId
    version: Count
    tokens: Count
    lineage: Count
    """Number of operations the KV state carries."""
    influenced_tokens: Count
    undoable: bool
    idle_s: float
