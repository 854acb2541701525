"""A context that is prefilled once and timed many times: after every turn the edit is taken back.

A deletion in place is taken back by inserting the evicted tokens again (they are prefilled, what follows is turned
back), a copying one by ``undo``, an append by cutting it off. So a sweep over context lengths costs what it moves, not
a prefill per sample.
"""

from __future__ import annotations

import secrets
import time

from leyline_client import Directive, LeylineClient, SpliceRequest

from .turns import MeasurementFailed, Sample, Shape, Timer

KINDS = ("append", "splice", "splice_copy")


class Standing:
    """One session standing at ``shape.context`` tokens.

    Args:
        client: of the server.
        shape: sizes.
        seed: of the tokens.
        vocabulary: size of the model's.
    """

    def __init__(self, client: LeylineClient, shape: Shape, *, seed: int, vocabulary: int) -> None:
        self._client, self._shape = client, shape
        self._timer = Timer(client, shape, seed=seed, vocabulary=vocabulary)
        self._salt = secrets.token_hex(8)
        self._context = self._timer.ids(shape.context)
        first = client.splice(SpliceRequest(append=self._context, cache_salt=self._salt))
        self._session, self._output = first.session, first.output_ids

    def take(self, kind: str) -> Sample:
        """Time one turn of a kind (`KINDS`), then bring the session back.

        Raises:
            MeasurementFailed: a receipt says that something else happened.
        """
        arm = "append" if kind == "append" else "splice"
        source = (*self._context, *self._output)
        request = self._timer.request(arm, self._session, source, self._salt, keep_source=kind == "splice_copy")
        began = time.perf_counter()
        reply = self._client.splice(request)
        ms = 1e3 * (time.perf_counter() - began)
        self._timer.check(arm, reply.receipt, len(self._output))
        if kind == "splice_copy":
            self._client.undo(self._session, cache_salt=self._salt)
        else:
            length = reply.receipt.prompt_tokens + len(reply.output_ids)
            self._restore(length, deleted=arm == "splice")
        return Sample(arm, ms, reply.receipt)

    def _restore(self, length: int, *, deleted: bool) -> None:
        shape = self._shape
        evicted = shape.evicted if deleted else 0
        edits = [Directive(start=shape.context - evicted, end=length)]
        if deleted:
            lost = self._context[shape.position : shape.position + shape.evicted]
            edits.insert(0, Directive(start=shape.position, end=shape.position, replacement=lost))
        request = SpliceRequest(session=self._session, directives=tuple(edits), cache_salt=self._salt)
        reply = self._client.splice(request)
        receipt = reply.receipt
        if receipt.prompt_tokens != shape.context or receipt.prefilled_tokens > evicted + 1:
            raise MeasurementFailed(
                f"bringing the context back computed {receipt.prefilled_tokens} of {receipt.prompt_tokens} tokens "
                f"({receipt.executed}, {receipt.reason or 'no reason'})"
            )
        self._output = reply.output_ids

    def close(self) -> None:
        """End the session."""
        self._client.delete_session(self._session, cache_salt=self._salt)
