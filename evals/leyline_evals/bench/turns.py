"""The turns that are timed: each on a session of its own, with a context nobody else has in the cache.

::

    context  |-- 600 --|## 800 evicted ##|--------- kept ---------|o|
    append   |-- 600 --|## 800 evicted ##|--------- kept ---------|o|+++|
    splice   |-- 600 --|--------- kept ---------|o|+++|
    stub     |-- 600 --|rr|--------- kept ---------|o|+++|
    reprefill  as splice, sent as a new prompt: a plain server has the first 600 tokens cached

``o`` is the token the context's own turn generated (no KV yet), ``+`` the new tail, ``r`` a replacement of ten tokens.
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass

from leyline_client import Directive, Executed, LeylineClient, Mode, Receipt, SpliceRequest

ARMS = ("append", "splice", "splice_stub", "reprefill")

_FIRST_ID, _LAST_ID = 1_000, 40_000
"""Plain tokens of the vocabulary, none of them special."""


class MeasurementFailed(RuntimeError):
    """The server did something else than what was to be timed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in tokens."""

    context: int = 5_000
    evicted: int = 800
    position: int = 600
    tail: int = 12
    stub: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.position < self.position + self.evicted < self.context:
            raise ValueError("the evicted span must lie within the context")


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed turn."""

    arm: str
    ms: float
    """Wall time of a turn that generates one token, as the client sees it."""
    receipt: Receipt


class Timer:
    """Makes sessions on a server and times one turn of each kind."""

    def __init__(self, client: LeylineClient, shape: Shape, *, seed: int, vocabulary: int) -> None:
        self._client, self.shape = client, shape
        self._random = random.Random(seed)
        self._last_id = min(_LAST_ID, vocabulary)
        if self._last_id <= _FIRST_ID:
            self._first_id = self._last_id // 4
        else:
            self._first_id = _FIRST_ID

    def take(self, arm: str, *, keep_source: bool = False) -> Sample:
        """Prefill a fresh context, then time the turn on it.

        Args:
            arm: one of `ARMS`.
            keep_source: splice by copying, and keep what was there before (by default it is given up and turned in
                place).

        Raises:
            MeasurementFailed: the receipt says that something else happened.
        """
        shape, salt = self.shape, secrets.token_hex(8)
        # A plain server can use what lies before the edit, and nothing else: no need to prefill more for it.
        context = self.ids(shape.position if arm == "reprefill" else shape.context)
        first = self._client.splice(SpliceRequest(append=context, cache_salt=salt))
        source = (*context, *first.output_ids)
        source += self.ids(shape.context + len(first.output_ids) - len(source))
        request = self.request(arm, first.session, source, salt, keep_source)
        began = time.perf_counter()
        reply = self._client.splice(request)
        ms = 1e3 * (time.perf_counter() - began)
        for session in {first.session, reply.session}:
            self._client.delete_session(session, cache_salt=salt)
        self.check(arm, reply.receipt, len(first.output_ids))
        return Sample(arm, ms, reply.receipt)

    def request(self, arm: str, session: str, source: tuple[int, ...], salt: str, keep_source: bool) -> SpliceRequest:
        """The turn of an arm on `session`, whose tokens are `source`."""
        shape, tail = self.shape, self.ids(self.shape.tail)
        start, end = shape.position, shape.position + shape.evicted
        if arm == "append":
            return SpliceRequest(session=session, append=tail, cache_salt=salt)
        if arm == "reprefill":
            return SpliceRequest(append=(*source[:start], *source[end:], *tail), cache_salt=salt)
        replacement = self.ids(shape.stub) if arm == "splice_stub" else ()
        edit = Directive(start=start, end=end, replacement=replacement, mode=Mode.AMORTIZE)
        return SpliceRequest(session=session, directives=(edit,), append=tail, cache_salt=salt, keep_source=keep_source)

    def ids(self, count: int) -> tuple[int, ...]:
        """Random plain tokens."""
        return tuple(self._random.randrange(self._first_id, self._last_id) for _ in range(count))

    def check(self, arm: str, receipt: Receipt, generated: int) -> None:
        """Raise `MeasurementFailed` unless the receipt says what the arm is to do."""
        shape = self.shape
        spliced = arm.startswith("splice")
        kept = shape.context if arm == "append" else shape.context - shape.evicted
        stub = shape.stub if arm == "splice_stub" else 0
        # The newest generated token was never fed back: it has no KV yet.
        new = shape.tail + stub + 1
        if arm == "reprefill":
            new += kept - shape.position + generated - 1
        good = (
            receipt.executed is (Executed.AMORTIZE if spliced else Executed.APPEND)
            and receipt.prompt_tokens == kept + generated + shape.tail + stub
            and receipt.prefilled_tokens <= new
            and receipt.rotated_tokens >= (kept - shape.position if spliced else 0)
        )
        if not good:
            raise MeasurementFailed(
                f"{arm}: the server says {receipt.executed} ({receipt.reason or 'no reason'}), {receipt.prompt_tokens} "
                f"prompt tokens, {receipt.rotated_tokens} rotated, {receipt.prefilled_tokens} prefilled (due: {new})"
            )
