"""What the two sessions share: settings, conversations, totals. No I/O, and nothing that waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

from . import _calls
from ._arguments import ChatRequest
from ._conversation import Conversation, Conversations
from ._errors import ConfigurationError
from ._models import Mode, Receipt
from ._outcome import TurnResult, kept_out, settle
from ._stats import SessionStats
from ._turn import Answer, OnHistoryEdit, Settings, Strategy, TurnEngine
from .policy import PolicySpec, TokenCounter, resolve

RECEIPTS_KEPT = 10_000
"""Receipts a session keeps; its totals count all."""


class SessionOptions(TypedDict, total=False):
    """What both sessions take by keyword, besides where the server is."""

    policies: Sequence[PolicySpec]
    """Names (``"truncate-older-than-n:n=3"``), pairs of name and parameters, or objects; asked in order."""
    mode: Mode | Literal["amortize", "forget"] | None
    """None (default): each edit has the mode its policy gave it. ``forget``: all edits forget. ``amortize``: as None,
    because a policy that forgets where amortize is the default (redaction) means it."""
    on_history_edit: OnHistoryEdit
    """What happens where the agent itself changed an earlier message: ``amortize``: the change is spliced;
    ``forget`` (default): prefilled again; ``error``: refused with `HistoryEdited`."""
    strategy: Strategy
    """``strict`` (default): the server must have the extension. ``fallback``: without it, or where it refuses a turn,
    edits are applied here and the engine prefills; said once as a `LeylineWarning`. ``observe``: policies decide,
    nothing is edited, and `SessionStats` estimates what the edits would have kept out."""
    cache_salt: str | None
    """Keeps this session's KV apart from everyone else's."""
    keep_source: bool
    """Ask the server to keep the KV before an edit, so that `undo` needs no prefill."""
    veto_unprofitable: bool
    """Let the server leave out an edit that costs more than it saves."""
    restore_replies: bool
    """Where a framework sends a reply back with the same meaning but other characters (arguments re-serialised, a
    newline stripped), send what the model wrote, whose tokens are cached (default True)."""
    max_retries: int
    """How often a request is sent again after a timeout, a broken connection or a 503 (default 2)."""
    max_conversations: int
    """Conversations remembered (default 64); the least recently used idle one is ended first."""
    token_counter: TokenCounter | Literal["server"] | None
    """Counts tokens for policies; by default an estimate. ``server``: exactly as the served model's tokenizer, whose
    vocabulary is fetched before the first turn and kept on disk (see `LeylineClient.token_counter`)."""
    on_receipt: Callable[[Receipt], None] | None
    """Called with the receipt of every turn."""


class SessionCore:
    """Base of both sessions."""

    def __init__(
        self,
        lock_factory: Callable[[], Any],
        *,
        policies: Sequence[PolicySpec] = (),
        mode: Mode | Literal["amortize", "forget"] | None = None,
        on_history_edit: OnHistoryEdit = "forget",
        strategy: Strategy = "strict",
        cache_salt: str | None = None,
        keep_source: bool = False,
        veto_unprofitable: bool = False,
        restore_replies: bool = True,
        max_retries: int = 2,
        max_conversations: int = 64,
        token_counter: TokenCounter | Literal["server"] | None = None,
        on_receipt: Callable[[Receipt], None] | None = None,
    ) -> None:
        _one_of("strategy", strategy, get_args(Strategy))
        _one_of("on_history_edit", on_history_edit, get_args(OnHistoryEdit))
        _one_of("mode", mode, (*Mode, None))
        if not isinstance(token_counter, TokenCounter | None):
            _one_of("token_counter", token_counter, ("server",))
        if max_retries < 0 or max_conversations < 1:
            raise ConfigurationError("max_retries must be at least 0 and max_conversations at least 1")
        settings = Settings(
            policies=resolve(policies, counter=token_counter if isinstance(token_counter, TokenCounter) else None),
            mode=None if mode is None else Mode(mode),
            on_history_edit=on_history_edit,
            strategy=strategy,
            cache_salt=cache_salt,
            keep_source=keep_source,
            veto_unprofitable=veto_unprofitable,
            restore_replies=restore_replies,
            max_retries=max_retries,
            counter_from_server=token_counter == "server" and bool(policies),
        )
        self._engine = TurnEngine(settings)
        self._conversations = Conversations(max_conversations, lock_factory)
        self._on_receipt = on_receipt
        self._guard = threading.Lock()
        self._receipts: deque[Receipt] = deque(maxlen=RECEIPTS_KEPT)
        self._stats = SessionStats()

    @property
    def stats(self) -> SessionStats:
        """Totals over all turns."""
        self._stats.retries = self._engine.retries
        return self._stats

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts of all turns, oldest first (of the last 10,000)."""
        return list(self._receipts)

    @property
    def last(self) -> Receipt | None:
        """The receipt of the last turn that was answered."""
        return self._receipts[-1] if self._receipts else None

    def _complete(self, conversation: Conversation, answer: Answer, data: Mapping[str, Any]) -> TurnResult:
        """A turn's reply, or its stream, is complete: note what it came to."""
        result = settle(self._engine, conversation, answer, data)
        for choice in data.get("choices") or ():
            conversation.generated.note(choice.get("message") or {})
        with self._guard:
            self._receipts.append(result.receipt)
            self._stats.add(result.receipt, kept_out(conversation, answer, result.receipt))
            self._stats.edits += len(answer.plan.new)
        if self._on_receipt is not None:
            self._on_receipt(result.receipt)
        return result

    def _reserve(self, request: ChatRequest) -> tuple[Conversation, list[Conversation]]:
        return self._conversations.reserve(request.key, request.history)

    def _current(self, key: str | None) -> Conversation:
        found = self._conversations.latest() if key is None else self._conversations.named(key)
        if found is None or found.session is None:
            raise ConfigurationError("there is no turn yet, so no session on the server")
        return found

    def _delete_call(self, conversation: Conversation) -> _calls.Call[None] | None:
        if conversation.session is None:
            return None
        return _calls.delete_session(conversation.session, self._engine.settings.cache_salt)


def _one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        names = ", ".join(repr(str(one)) if one is not None else "None" for one in allowed)
        raise ConfigurationError(f"{name} must be one of {names}, not {value!r}")
