"""Sessions: what the HTTP process remembers of a conversation between two prompts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from leyline_client._errors import NothingToUndo, TooManySessions, UnknownSession, VersionConflict
from leyline_client._models import Directive, Edit

from .lineage import Lineage, as_empty_ids
from .plan import MAX_ANCESTORS, Ancestor, View
from .strays import Strays, joined, of_view, pruned


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything a turn needs of the ones before it. Immutable: a turn that fails leaves it as it was."""

    view: View = field(default_factory=lambda: View(as_empty_ids(), Lineage()))
    prompt_length: int = 0
    """Of ``view.ids``, how many were prompt; the rest was generated."""
    ancestors: tuple[Ancestor, ...] = ()
    digests: tuple[bytes, ...] = ()
    """One per message of the last turn, as the agent wrote it."""
    edits: tuple[Edit | Directive, ...] = ()


@dataclass(slots=True)
class Session:
    """One conversation. ``lock`` serialises its turns; everything else changes only when a turn is complete."""

    id: str
    cache_salt: str | None
    dp_rank: int | None = None
    version: int = 0
    memory: Memory = field(default_factory=Memory)
    earlier: list[tuple[float, Memory]] = field(default_factory=list)
    """Views to undo to, oldest first, with the time they were left (seconds, monotonic)."""
    strays: Strays = ()
    """Keys that no view names and that KV of this session may lie under (see `strays`)."""
    used_at: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def expect(self, version: int | None) -> None:
        """Compare-and-swap: raise `VersionConflict` unless the session stands at ``version``."""
        if version is not None and version != self.version:
            raise VersionConflict(
                f"the session stands at version {self.version}, not {version}",
                param="leyline.expected_version",
                detail={"version": self.version},
            )

    def advance(self, memory: Memory, *, keep: bool, now: float, gone: bool = False) -> None:
        """A turn is complete. With ``keep`` the view before it can be undone to; ``gone``: its own KV was dropped."""
        before = self.views()[gone:]
        if keep:
            self.earlier = [*self.earlier, (now, self.memory)][-MAX_ANCESTORS:]
        self.memory, self.version, self.used_at = memory, self.version + 1, now
        self._leave(before)

    def undone(self, now: float, ttl: float) -> Memory:
        """What `undo` would go back to.

        Raises:
            NothingToUndo: no edit was made with ``keep_source``, or it is longer ago than the TTL.
        """
        self.expire(now, ttl)
        if not self.earlier:
            raise NothingToUndo("no earlier view is kept; send edits with keep_source=true to be able to undo them")
        return self.earlier[-1][1]

    def undo(self, now: float, ttl: float) -> None:
        """Go back to the view before the last kept edit. Raises as `undone`."""
        memory, before = self.undone(now, ttl), self.views()
        self.earlier.pop()
        self.memory = memory
        self.version, self.used_at = self.version + 1, now
        self._leave(before)

    def purged(self, *, all_gone: bool, now: float) -> None:
        """Every view and stray was dropped from the cache; the tokens stay. Not ``all_gone``: some KV is in use."""
        before = self.views()
        self.earlier.clear()
        self.memory = replace(self.memory, view=View(self.memory.view.ids), ancestors=())
        self.version, self.used_at = self.version + 1, now
        if all_gone:
            self.strays = ()
        else:
            self._leave(before)

    def expire(self, now: float, ttl: float) -> None:
        """Forget views left longer than ``ttl`` seconds ago."""
        before = self.views()
        self.earlier = [entry for entry in self.earlier if now - entry[0] <= ttl]
        self._leave(before)

    def views(self) -> list[View]:
        """Every view the session can still be at or take KV from; the current one first."""
        found = [self.memory.view]
        for memory in (self.memory, *(memory for _, memory in self.earlier)):
            for view in (memory.view, *(ancestor.view for ancestor in memory.ancestors)):
                if not any(view is other for other in found):
                    found.append(view)
        return found

    def _leave(self, before: list[View]) -> None:
        """Views of ``before`` that are none any more are strays, where they are not within another."""
        now = self.views()
        left = [view for view in before if not any(view is other for other in now)]
        if left or self.strays:
            self.strays = pruned(joined(self.strays, map(of_view, left)), of_view(self.memory.view))


class Sessions:
    """All sessions of one server: bounded, with a TTL, found only under the cache salt they were made with.

    Args:
        limit: most sessions at a time.
        ttl: seconds without a turn after which a session may be dropped.
        dp_size: data parallel ranks.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, limit: int, ttl: float, dp_size: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit, self.ttl, self.clock = limit, ttl, clock
        self._dp_size = dp_size
        self._by_id: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def spliced(self) -> int:
        """Sessions whose KV carries operations."""
        return sum(1 for session in self._by_id.values() if session.memory.view.lineage)

    def create(self, cache_salt: str | None) -> Session:
        """A new session; raises `TooManySessions` when all places are taken by sessions still in use."""
        self.expire()
        if len(self._by_id) >= self.limit:
            raise TooManySessions(
                f"{self.limit} sessions are open; delete one or wait up to {self.ttl:.0f} s",
                param="leyline.session",
                detail={"limit": self.limit},
            )
        session = Session(secrets.token_urlsafe(18), cache_salt, self._rank(), used_at=self.clock())
        self._by_id[session.id] = session
        return session

    def _rank(self) -> int | None:
        """The data parallel rank with the fewest sessions: all requests of a session must reach the one with its KV."""
        if self._dp_size == 1:
            return None
        taken = Counter(session.dp_rank for session in self._by_id.values())
        return min(range(self._dp_size), key=lambda rank: taken[rank])

    def get(self, session_id: str, cache_salt: str | None) -> Session:
        """The session; raises `UnknownSession` also where it exists under another salt."""
        self.expire()
        session = self._by_id.get(session_id)
        if session is None or session.cache_salt != cache_salt:
            raise UnknownSession(
                "no such session (ended, timed out or lost in a restart): send the turn without it to start over",
                param="leyline.session",
            )
        session.used_at = self.clock()
        self._by_id.move_to_end(session_id)
        return session

    def delete(self, session: Session) -> None:
        """End a session."""
        self._by_id.pop(session.id, None)

    def expire(self) -> None:
        """Drop what timed out; sessions with a turn in progress stay."""
        now = self.clock()
        for session in list(self._by_id.values()):
            if now - session.used_at <= self.ttl:
                break
            if not session.lock.locked():
                del self._by_id[session.id]
