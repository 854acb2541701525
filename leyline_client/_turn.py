"""One turn of a session without any I/O: a generator that says what to send, and is told what came back.

::

    history ──relate──▶ conversation ──policies──▶ edits ──▶ request ──▶ reply ──▶ receipt
                         (standing edits)            │           │
                                                     │           └─ retry, adopt version, recover the session
                                                     └─ strategy: extension, plain with local edits, observe

The drivers in `LeylineSession` and `AsyncLeylineSession` do the sending and the sleeping, and nothing else.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from . import _calls
from ._arguments import ChatRequest
from ._conversation import Conversation
from ._edits import apply_edits
from ._errors import (
    ConfigurationError,
    ExtensionMissing,
    HistoryEdited,
    InternalError,
    LeylineError,
    Overloaded,
    ServerError,
    ServerTimeout,
    ServerUnreachable,
    UnknownSession,
    Unsupported,
    VersionConflict,
)
from ._history import JsonWriter, Relation, Standing
from ._http import Request
from ._models import Edit, Mode, Reason, TurnInfo, TurnOptions
from ._wire import ServerInfo
from .policy import PolicySet, TokenCounter

Strategy: TypeAlias = Literal["strict", "fallback", "observe"]
OnHistoryEdit: TypeAlias = Literal["amortize", "forget", "error"]

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 8.0


class LeylineWarning(UserWarning):
    """Something works, but not as well as it could: said once per session."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait so many seconds before going on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class FetchCounter:
    """Ask the client for `LeylineClient.token_counter`."""


Command: TypeAlias = "Request | Sleep | FetchCounter"
Steps: TypeAlias = Generator[Command, Any, Any]


@dataclass(slots=True)
class Settings:
    """What a session was made with. See `LeylineSession`."""

    policies: PolicySet
    mode: Mode | None
    on_history_edit: OnHistoryEdit
    strategy: Strategy
    cache_salt: str | None
    keep_source: bool
    veto_unprofitable: bool
    restore_replies: bool
    max_retries: int
    counter_from_server: bool = False
    """The policies still count with the estimate, and should not."""


@dataclass(slots=True)
class Plan:
    """A turn before it is sent."""

    carried: tuple[Standing, ...]
    new: tuple[Edit, ...]

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All that should hold in this turn."""
        return (*(one.edit for one in self.carried), *self.new)


@dataclass(slots=True)
class Answer:
    """A turn that the server accepted: a whole reply, or an open stream."""

    reply: Any
    plan: Plan
    plain: Reason | None = None
    """Why it went to the engine's own route; None: it did not."""
    observed: bool = False
    recovered: bool = False
    usage_added: bool = False
    """The stream reports usage only because the session asked for it."""
    overtaken: bool = False
    """A later turn of the conversation has begun before this one's stream ended."""


class TurnEngine:
    """The turns of one session; what it knows of the server is shared by all conversations."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.info: ServerInfo | None = None
        self.plain: Reason | None = None
        """Why this server gets plain requests only (strategy ``fallback``)."""
        self.retries = 0
        self._warned: set[str] = set()

    def take_turn(self, request: ChatRequest, conversation: Conversation) -> Generator[Command, Any, Answer]:
        """One turn, up to its reply or its open stream. Raises what `LeylineSession` documents."""
        relation, prefix = conversation.relate(request.history.fragments)
        on_edit = request.options.get("on_history_edit", self.settings.on_history_edit)
        if relation is Relation.EDITED and on_edit == "error":
            raise HistoryEdited(f"message {prefix} is not what was sent before", param="messages")
        if self.settings.strategy != "observe" and self.info is None and self.plain is None:
            yield from self._handshake()
        if self.settings.counter_from_server:
            yield from self._fetch_counter()
        # The very strings of the turn before: what looks them up need not hash or compare their characters again.
        request.history.fragments[:prefix] = conversation.fragments[:prefix]
        carried = conversation.carried(request.history.fragments, prefix)
        # Recognised by what the agent sent; planned and sent in the model's own words.
        history = request.history
        if self.settings.restore_replies and self.settings.strategy != "observe":
            history = conversation.generated.restore(history)
        restored = replace(request, history=history)
        plan = self._plan(restored, conversation, carried)
        answer = yield from self._deliver(restored, conversation, plan)
        conversation.sent(request.history, history.messages, plan.carried, plan.new)
        return answer

    def operate(self, conversation: Conversation, undo: bool) -> Generator[Command, Any, TurnInfo]:
        """Undo or purge. Sent once: after a lost reply nobody knows whether a second undo would be the first."""
        make = _calls.undo if undo else _calls.purge
        while True:
            call = make(conversation.session or "", conversation.version, self.settings.cache_salt)
            try:
                info = call.parse((yield call.request))
                break
            except VersionConflict as conflict:
                if not _adopt(conversation, conflict):
                    raise
            except UnknownSession:
                conversation.forget_session()
                raise
            except ServerError:
                raise
            except BaseException:
                count_unanswered(conversation)
                raise
        conversation.version = info.version
        if undo:
            conversation.took_back()
        return info

    def warn_once(self, what: str, message: str) -> None:
        """Warn the first time ``what`` happens."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, LeylineWarning, stacklevel=2)

    def _handshake(self) -> Generator[Command, Any, None]:
        call = _calls.info()
        try:
            info = call.parse((yield from self._retrying(lambda: call.request, None)))
        except ExtensionMissing:
            if self.settings.strategy == "strict":
                raise
            self._go_plain("no Leyline extension: edits are applied here and prefilled again")
            return
        if not info.enabled:
            why = "; ".join(info.refusals) or "no reason given"
            if self.settings.strategy == "strict":
                raise Unsupported(f"this server cannot splice: {why}", detail={"reason": "; ".join(info.refusals)})
            self._go_plain(f"an extension that cannot splice ({why}): edits are applied here and prefilled again")
            return
        self.info = info

    def _fetch_counter(self) -> Generator[Command, Any, None]:
        try:
            counter = yield from self._retrying(FetchCounter, None)
        except (ExtensionMissing, ServerError) as error:
            counter = TokenCounter(name=f"estimate: {error}")
        if not counter.exact:
            self.warn_once("counter", f"tokens are not counted as the served model counts them ({counter.name})")
        self.settings.policies = PolicySet(self.settings.policies.policies, counter=counter)
        self.settings.counter_from_server = False

    def _go_plain(self, what: str) -> None:
        self.info, self.plain = None, Reason.UNSUPPORTED_SERVER
        self.warn_once("plain", f"the server has {what}")

    def _plan(self, request: ChatRequest, conversation: Conversation, carried: tuple[Standing, ...]) -> Plan:
        standing = tuple(one.edit for one in carried)
        history = request.history
        new = self.settings.policies.plan(
            history.messages, tools=request.tools, standing=standing, texts=history.fragments
        )
        if self.settings.mode is Mode.FORGET:
            # The other way round a policy's own forget stands: it is a promise (redaction), not a preference.
            new = [edit.model_copy(update={"mode": Mode.FORGET}) for edit in new]
        return Plan(carried, tuple(edit for edit in new if edit not in conversation.undone))

    def _deliver(self, request: ChatRequest, conversation: Conversation, plan: Plan) -> Generator[Command, Any, Answer]:
        if self.settings.strategy == "observe":
            return (yield from self._plainly(request, plan, None))
        if self.plain is not None:
            return (yield from self._plainly(request, plan, self.plain))
        try:
            return (yield from self._spliced(request, conversation, plan))
        except ExtensionMissing:
            if self.settings.strategy == "strict":
                raise
            self._go_plain("lost its Leyline extension: edits are applied here and prefilled again")
            reason = Reason.UNSUPPORTED_SERVER
        except (Unsupported, InternalError) as refusal:
            if self.settings.strategy == "strict":
                raise
            self.warn_once(refusal.code, f"the extension refused a turn, which went on without it ({refusal})")
            internal = isinstance(refusal, InternalError)
            reason = Reason.INTERNAL_ERROR if internal else Reason.UNSUPPORTED_REQUEST
        return (yield from self._plainly(request, plan, reason))

    def _spliced(self, request: ChatRequest, conversation: Conversation, plan: Plan) -> Generator[Command, Any, Answer]:
        had_session = conversation.session is not None

        def build() -> Request:
            options = self._options(request, conversation, plan)
            tail = f',"leyline":{options.model_dump_json()}'
            return request.build(_calls.CHAT, request.history.fragments, tail, self._salted())

        reply = yield from self._retrying(build, conversation)
        recovered = had_session and conversation.session is None
        return Answer(reply, plan, recovered=recovered)

    def _plainly(self, request: ChatRequest, plan: Plan, reason: Reason | None) -> Generator[Command, Any, Answer]:
        fragments: Sequence[str] = request.history.fragments
        if plan.edits and reason is not None:
            edited = apply_edits(request.history.messages, plan.edits)
            fragments = JsonWriter().read(edited).fragments
        wants_usage = bool((request.fields.get("stream_options") or {}).get("include_usage"))
        extra = self._salted()
        usage_added = request.stream and not wants_usage
        if usage_added:
            extra["stream_options"] = {**(request.fields.get("stream_options") or {}), "include_usage": True}
        built = request.build(_calls.PLAIN_CHAT, fragments, "", extra)
        reply = yield from self._retrying(lambda: built, None)
        return Answer(reply, plan, reason, observed=reason is None, usage_added=usage_added)

    def _options(self, request: ChatRequest, conversation: Conversation, plan: Plan) -> TurnOptions:
        given = {
            "edits": plan.edits,
            "on_history_edit": self.settings.on_history_edit,
            "keep_source": self.settings.keep_source,
            "veto_unprofitable": self.settings.veto_unprofitable,
            **request.options,
            "session": conversation.session,
            "expected_version": None if conversation.session is None else conversation.version,
        }
        try:
            return TurnOptions(**given)
        except ValueError as error:
            raise ConfigurationError(f"leyline options: {error}") from error

    def _salted(self) -> dict[str, Any]:
        return {} if self.settings.cache_salt is None else {"cache_salt": self.settings.cache_salt}

    def _retrying(self, build: Any, conversation: Conversation | None) -> Generator[Command, Any, Any]:
        """Send what ``build`` gives until it is answered: bounded, and never in a way that could edit twice.

        A turn carries all its edits against the unedited history, so sending it again does no harm. If the server
        did carry out a turn whose reply was lost, it stands further on than we know: its version is adopted if only
        our own lost turns can have moved it there.
        """
        attempt = 0
        while True:
            try:
                return (yield build())
            except (ServerTimeout, ServerUnreachable):
                count_unanswered(conversation)
                if attempt >= self.settings.max_retries:
                    raise
            except Overloaded:
                if attempt >= self.settings.max_retries:
                    raise
            except VersionConflict as conflict:
                if conversation is None or not _adopt(conversation, conflict):
                    raise
                continue
            except UnknownSession:
                if conversation is None or conversation.session is None:
                    raise
                conversation.forget_session()
                continue
            except LeylineError:
                raise
            except BaseException:
                # Cancelled or interrupted while waiting: whether the server carried it out is not known.
                count_unanswered(conversation)
                raise
            attempt += 1
            self.retries += 1
            yield Sleep(_backoff(attempt))


def count_unanswered(conversation: Conversation | None) -> None:
    if conversation is not None and conversation.session is not None:
        conversation.unanswered += 1


def _adopt(conversation: Conversation, conflict: VersionConflict) -> bool:
    """Take over the server's version where our own unanswered turns explain it."""
    version = conflict.detail.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        return False
    ahead = version - conversation.version
    if not 0 < ahead <= conversation.unanswered:
        return False
    conversation.version, conversation.unanswered = version, conversation.unanswered - ahead
    return True


def _backoff(attempt: int) -> float:
    longest: float = min(FIRST_BACKOFF_S * 2 ** (attempt - 1), LONGEST_BACKOFF_S)
    return longest * (1 - 0.25 * random.random())
