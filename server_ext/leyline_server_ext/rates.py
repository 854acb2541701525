"""What an edit costs and frees, from what this server has measured so far."""

from __future__ import annotations

from leyline_client._models import Mode, Receipt
from leyline_client._wire import PlanReply

from .receipts import Outcome, build_receipt
from .turns import Turn

_SMOOTHING = 0.2
_ENOUGH = 256
"""Tokens a turn must move or prefill before its time says something about the rate."""


class Rates:
    """Running means of the cost of moving and of prefilling a token, learnt from finished turns."""

    def __init__(self) -> None:
        self.graft_ms_per_token: float | None = None
        self.prefill_ms_per_token: float | None = None

    def learn(self, receipt: Receipt, outcome: Outcome) -> None:
        """Take a finished turn into account."""
        if receipt.rotated_tokens >= _ENOUGH:
            self.graft_ms_per_token = _mean(self.graft_ms_per_token, receipt.graft_ms / receipt.rotated_tokens)
        elif receipt.prefilled_tokens >= _ENOUGH and outcome.first_token_ms is not None:
            rate = outcome.first_token_ms / receipt.prefilled_tokens
            self.prefill_ms_per_token = _mean(self.prefill_ms_per_token, rate)

    def predict(self, turn: Turn) -> PlanReply:
        """The receipt ``turn`` would get if every source is still cached, and whether its edits pay."""
        plan = turn.plan
        assert plan is not None
        pieces = plan.order.pieces
        cached = pieces[-1].end if pieces else _clean_prefix(turn)
        segments = []
        for piece in pieces:
            oldest = piece.candidates[0]
            delta = piece.start - oldest.start
            segments.append((piece.start, piece.end, delta, oldest.generation + bool(delta)))
        outcome = Outcome(cached=cached, warmed=plan.warmed, report={"segments": segments})
        receipt = build_receipt(plan, outcome)
        moved = sum(segment.end - segment.start for segment in receipt.segments)
        return PlanReply(
            receipt=receipt,
            worth_it=self._worth_it(receipt, moved),
            saved_prefill_tokens=moved - receipt.replacement_tokens,
            splice_ms=_times(self.graft_ms_per_token, moved),
            reprefill_ms=_times(self.prefill_ms_per_token, moved + receipt.prefilled_tokens),
        )

    def _worth_it(self, receipt: Receipt, moved: int) -> bool:
        """Whether amortize frees more tokens than the edit costs to compute (moved ones at their measured price).

        A forget is never a matter of price.
        """
        if not receipt.directives or any(directive.mode is Mode.FORGET for directive in receipt.directives):
            return True
        freed = sum(d.end - d.start - d.replacement_tokens for d in receipt.directives)
        price = 0.0
        if self.graft_ms_per_token is not None and self.prefill_ms_per_token:
            price = self.graft_ms_per_token / self.prefill_ms_per_token
        return freed > receipt.replacement_tokens + price * moved


def _clean_prefix(turn: Turn) -> int:
    """How much of the target the session's view holds unchanged, in whole pages and without the last prompt token."""
    assert turn.plan is not None
    fed, page = len(turn.session.memory.view.ids) - 1, turn.facts.page_size
    kept = turn.changes[0].hunk.target_start if turn.changes else fed
    return max(0, min(kept, fed, len(turn.plan.target) - 1)) // page * page


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _SMOOTHING * (now - before)


def _times(rate: float | None, tokens: int) -> float | None:
    return None if rate is None else round(rate * tokens, 3)
