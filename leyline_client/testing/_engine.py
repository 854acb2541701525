"""The fake server's engine: sessions with versions, their tokens, and receipts that add up."""

from __future__ import annotations

import difflib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leyline_client._edits import apply_edits
from leyline_client._errors import (
    HistoryEdited,
    InvalidDirective,
    NothingToUndo,
    TooManySessions,
    UnknownSession,
    VersionConflict,
)
from leyline_client._models import (
    Directive,
    Edit,
    Executed,
    Mode,
    Part,
    Receipt,
    TurnInfo,
    TurnOptions,
    apply_directives,
    check_directives,
)
from leyline_client._wire import RenderReply, RenderRequest, SessionView, SpliceRequest

from ._diff import Change, Diff, State, account, diff_pieces, fresh
from ._toy import Message, Owner, Piece, ToyTemplate, ToyTokenizer, cut, flatten, part_spans


@dataclass(frozen=True, slots=True)
class View:
    """One state of a session's cache."""

    pieces: tuple[Piece, ...] = ()
    messages: tuple[str, ...] = ()
    """The unedited messages it was rendered from, as JSON."""
    influenced_from: int | None = None
    operations: int = 0

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return sum(len(piece.tokens) for piece in self.pieces)


@dataclass(slots=True)
class FakeSession:
    """A session as the fake server holds it."""

    id: str
    salt: str | None
    version: int = 0
    view: View = field(default_factory=View)
    undoable: View | None = None
    used: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn worked out but not yet committed."""

    session: FakeSession | None
    salt: str | None
    prompt: tuple[Piece, ...]
    receipt: Receipt
    influenced_from: int | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The edited messages."""
    written: tuple[str, ...] = ()


class FakeEngine:
    """Sessions over a toy tokenizer. Not thread-safe: the server around it holds a lock."""

    def __init__(self, max_sessions: int) -> None:
        self.tokenizer = ToyTokenizer()
        self.template = ToyTemplate(self.tokenizer)
        self.sessions: dict[str, FakeSession] = {}
        self._max_sessions = max_sessions
        self._clean: dict[str | None, list[list[int]]] = {}

    def render(self, request: RenderRequest) -> RenderReply:
        """``POST render``."""
        pieces = self._pieces(request.messages, request.edits, request.tools, request.add_generation_prompt)
        tokens = flatten(pieces)
        return RenderReply(
            prompt_tokens=len(tokens),
            token_ids=tokens if request.return_token_ids else None,
            spans=part_spans(pieces),
        )

    def prepare_chat(self, body: Mapping[str, Any], options: TurnOptions) -> Prepared:
        """Work a message-level turn out."""
        messages, salt = body["messages"], body.get("cache_salt")
        session = self._session(options.session, salt, options.expected_version)
        pieces = self._pieces(messages, options.edits, body.get("tools"), True)
        if options.directives:
            _check(options.directives, len(flatten(pieces)), "leyline.directives")
            pieces = _spliced_pieces(pieces, options.directives)
        edited = apply_edits(messages, options.edits)
        if session is None:
            asked = [e.mode for e in options.edits] + [d.mode for d in options.directives]
            receipt = fresh(len(flatten(pieces)), self._clean_prefix(salt, flatten(pieces)), asked)
            return Prepared(None, salt, tuple(pieces), receipt, None, edited, _written(messages))
        judge = _Judge(options)
        diff = diff_pieces(_moved(session.view, _written(messages)), pieces, judge)
        if options.on_history_edit == "error" and any(not change.declared for change in diff.changes):
            raise HistoryEdited("the history is no extension of what the session holds", param="messages")
        if options.purge and session.view.influenced_from is not None:
            diff = _purged(diff, session.view)
        return self._prepared(session, diff, pieces, edited, _written(messages))

    def prepare_splice(self, request: SpliceRequest) -> Prepared:
        """Work a token-level turn out."""
        session = self._session(request.session, request.cache_salt, request.expected_version)
        source = list(session.view.pieces) if session else []
        if session is None and request.directives:
            raise InvalidDirective("a first turn has no source to edit", param="directives")
        length = len(flatten(source))
        _check(request.directives, length, "directives")
        pieces = [*_spliced_pieces(source, request.directives), Piece(request.append)]
        if session is None:
            receipt = fresh(len(request.append), self._clean_prefix(request.cache_salt, request.append), [])
            return Prepared(None, request.cache_salt, tuple(pieces), receipt, None)
        changes = tuple(Change(d.start, d.end, len(d.replacement), d.mode) for d in request.directives)
        return self._prepared(session, Diff(changes, length), pieces, [])

    def commit(self, turn: Prepared, reply: Sequence[Piece]) -> TurnInfo:
        """Carry a prepared turn out: the reply joins the session's tokens and the version moves."""
        session = turn.session or self._new_session(turn.salt)
        if turn.receipt.directives:
            session.undoable = session.view
            self._forget(turn, flatten(session.view.pieces))
        operations = session.view.operations + (1 if turn.receipt.directives else 0)
        pieces = _answered(turn.prompt, reply, len(turn.written)) if turn.written else (*turn.prompt, *reply)
        session.view = View(pieces, turn.written, turn.influenced_from, operations)
        session.version += 1
        session.used = time.monotonic()
        self._remember(turn.salt, flatten(session.view.pieces)[: turn.influenced_from])
        return TurnInfo(session=session.id, version=session.version, receipt=turn.receipt)

    def undo(self, session_id: str, salt: str | None, expected_version: int | None) -> TurnInfo:
        """``POST sessions/{id}/undo``."""
        session = self._require(session_id, salt, expected_version)
        if session.undoable is None:
            raise NothingToUndo("the session has no earlier view")
        session.view, session.undoable = session.undoable, None
        session.version += 1
        receipt = Receipt(prompt_tokens=session.view.tokens, cached_tokens=session.view.tokens)
        return TurnInfo(session=session.id, version=session.version, receipt=receipt)

    def purge(self, session_id: str, salt: str | None, expected_version: int | None) -> TurnInfo:
        """``POST sessions/{id}/purge``."""
        session = self._require(session_id, salt, expected_version)
        total, start = session.view.tokens, session.view.influenced_from
        kept = total if start is None else start
        session.view = replace(session.view, influenced_from=None)
        session.undoable = None
        session.version += 1
        receipt = Receipt(
            requested=Mode.FORGET,
            executed=Executed.FORGET,
            prompt_tokens=total,
            cached_tokens=kept,
            prefilled_tokens=total - kept,
            dropped_tokens=total - kept,
        )
        return TurnInfo(session=session.id, version=session.version, receipt=receipt)

    def view(self, session_id: str, salt: str | None) -> SessionView:
        """``GET sessions/{id}``."""
        session = self._require(session_id, salt, None)
        start = session.view.influenced_from
        return SessionView(
            session=session.id,
            version=session.version,
            tokens=session.view.tokens,
            lineage=session.view.operations,
            influenced_tokens=0 if start is None else session.view.tokens - start,
            undoable=session.undoable is not None,
            idle_s=time.monotonic() - session.used,
        )

    def delete(self, session_id: str, salt: str | None) -> None:
        """``DELETE sessions/{id}``."""
        del self.sessions[self._require(session_id, salt, None).id]

    def _prepared(
        self,
        session: FakeSession,
        diff: Diff,
        pieces: Sequence[Piece],
        messages: list[dict[str, Any]],
        written: tuple[str, ...] = (),
    ) -> Prepared:
        state = State(session.view.tokens, session.view.influenced_from)
        target = len(flatten(pieces))
        receipt, influenced_from = account(state, diff, target, 1)
        drift = max(0, session.view.tokens - diff.kept_end)
        receipt = receipt.model_copy(update={"drift_tokens": drift})
        return Prepared(session, session.salt, tuple(pieces), receipt, influenced_from, messages, written)

    def _pieces(
        self,
        messages: Sequence[Message],
        edits: Sequence[Edit],
        tools: Sequence[Message] | None,
        generation_prompt: bool,
    ) -> list[Piece]:
        removed = {edit.message for edit in edits if edit.part is Part.MESSAGE}
        numbers = [index for index in range(len(messages)) if index not in removed]
        return self.template.render(apply_edits(messages, edits), tools, generation_prompt, numbers)

    def _session(self, session_id: str | None, salt: str | None, expected_version: int | None) -> FakeSession | None:
        return None if session_id is None else self._require(session_id, salt, expected_version)

    def _require(self, session_id: str, salt: str | None, expected_version: int | None) -> FakeSession:
        session = self.sessions.get(session_id)
        if session is None or session.salt != salt:
            raise UnknownSession("no such session", param="leyline.session")
        if expected_version is not None and expected_version != session.version:
            raise VersionConflict(
                f"the session stands at version {session.version}",
                param="leyline.expected_version",
                detail={"version": session.version},
            )
        return session

    def _new_session(self, salt: str | None) -> FakeSession:
        if len(self.sessions) >= self._max_sessions:
            raise TooManySessions(f"the server holds {self._max_sessions} sessions")
        session = FakeSession(secrets.token_urlsafe(18), salt)
        self.sessions[session.id] = session
        return session

    def clean_tokens(self, body: Mapping[str, Any]) -> tuple[list[Piece], int]:
        """A request without a session: its prompt, and how much of it the cache holds."""
        pieces = self._pieces(body["messages"], (), body.get("tools"), True)
        tokens = flatten(pieces)
        return pieces, min(self._clean_prefix(body.get("cache_salt"), tokens), len(tokens) - 1)

    def remember(self, body: Mapping[str, Any], pieces: Sequence[Piece]) -> None:
        """A request without a session was answered."""
        self._remember(body.get("cache_salt"), flatten(pieces))

    def _clean_prefix(self, salt: str | None, tokens: Sequence[int]) -> int:
        best = 0
        for known in self._clean.get(salt, ()):
            low, high = best, min(len(known), len(tokens))
            while low < high:
                middle = (low + high + 1) // 2
                if list(tokens[:middle]) == known[:middle]:
                    low = middle
                else:
                    high = middle - 1
            best = max(best, low)
        return best

    def _forget(self, turn: Prepared, source: list[int]) -> None:
        """Drop what a forget must not leave behind: cached tokens from its position on."""
        starts = [d.start for d in turn.receipt.directives if d.mode is Mode.FORGET]
        if starts:
            known = self._clean.get(turn.salt, [])
            start = starts[0]
            known[:] = [other[:start] if other[:start] == source[:start] else other for other in known]

    def _remember(self, salt: str | None, tokens: list[int]) -> None:
        known = self._clean.setdefault(salt, [])
        known[:] = [other for other in known if other != tokens[: len(other)]][-31:]
        known.append(tokens)


class _Judge:
    """Says which mode a changed run gets, by the edits that touch the messages it belongs to."""

    def __init__(self, options: TurnOptions) -> None:
        self._modes: dict[int, set[Mode]] = {}
        for edit in options.edits:
            self._modes.setdefault(edit.message, set()).add(edit.mode)
        self._directive_modes = {directive.mode for directive in options.directives}
        self._otherwise = Mode.AMORTIZE if options.on_history_edit == "amortize" else Mode.FORGET

    def __call__(self, owners: Sequence[Owner | None]) -> tuple[Mode, bool]:
        modes = set(self._directive_modes)
        for owner in owners:
            if owner is not None:
                modes |= self._modes.get(owner[0], set())
        if not modes:
            return self._otherwise, False
        return (Mode.FORGET if Mode.FORGET in modes else Mode.AMORTIZE), True


def _written(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(json.dumps(message) for message in messages)


def _answered(prompt: Sequence[Piece], reply: Sequence[Piece], number: int) -> tuple[Piece, ...]:
    """Prompt and reply as the next turn will see them: the reply is message ``number``."""
    *before, header = prompt
    owned = [Piece(piece.tokens, piece.owner and (number, *piece.owner[1:])) for piece in reply]
    return (*before, Piece(header.tokens, (number, None, 0)), *owned)


def _moved(view: View, written: tuple[str, ...]) -> list[Piece]:
    """The view's pieces with the owners they have in a new history: that of another index, or none."""
    matcher = difflib.SequenceMatcher(None, view.messages, written, autojunk=False)
    moved: dict[int, int] = {}
    for tag, old, old_end, new, new_end in matcher.get_opcodes():
        # A message that the agent changed is still the same message.
        if tag == "equal" or (tag == "replace" and old_end - old == new_end - new):
            moved.update(zip(range(old, old_end), range(new, new_end), strict=True))
    moved[len(view.messages)] = moved.get(len(view.messages) - 1, len(view.messages) - 1) + 1
    gone = -2
    return [
        piece if piece.owner is None else Piece(piece.tokens, (moved.get(piece.owner[0], gone), *piece.owner[1:]))
        for piece in view.pieces
    ]


def _check(directives: Sequence[Directive], length: int, where: str) -> None:
    try:
        check_directives(tuple(directives), length)
    except ValueError as error:
        field_name, _, message = str(error).partition(": ")
        prefix = where.removesuffix("directives")
        raise InvalidDirective(message, param=prefix + field_name) from error


def _spliced_pieces(pieces: Sequence[Piece], directives: Sequence[Directive]) -> list[Piece]:
    result: list[Piece] = []
    position = 0
    for directive in directives:
        result += cut(pieces, position, directive.start)
        if directive.replacement:
            result.append(Piece(directive.replacement))
        position = directive.end
    result += cut(pieces, position, len(flatten(pieces)))
    if flatten(result) != apply_directives(flatten(pieces), tuple(directives)):
        raise AssertionError("the pieces of a splice and its tokens differ")
    return result


def _purged(diff: Diff, view: View) -> Diff:
    start = view.influenced_from or 0
    before = tuple(change for change in diff.changes if change.end <= start)
    return Diff((*before, Change(start, start, 0, Mode.FORGET)), diff.kept_end)
