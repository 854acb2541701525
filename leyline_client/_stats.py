"""Totals over the receipts of a session."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ._models import Executed, Reason, Receipt


@dataclass
class SessionStats:
    """Totals since the session was made. Counts are tokens unless said otherwise."""

    turns: int = 0
    """Answered turns."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rotated_tokens: int = 0
    prefilled_tokens: int = 0
    replacement_tokens: int = 0
    drift_tokens: int = 0
    dropped_tokens: int = 0
    graft_ms: float = 0.0
    edits: int = 0
    """Edits issued by policies (each counted once)."""
    estimated_tokens_kept_out: int = 0
    """Estimate: prompt tokens that edits kept out of the turns (strategy ``observe``: would have). Characters that
    edits freed, times the turn's own ratio of tokens to characters."""
    executed: Counter[Executed] = field(default_factory=Counter)
    """Turns by what was executed."""
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Turns by why something else happened than was asked."""
    retries: int = 0
    """Requests sent again."""

    @property
    def cached_fraction(self) -> float:
        """Share of all prompt tokens whose KV was reused; 0 before the first turn."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, receipt: Receipt, kept_out: int) -> None:
        """Count one turn."""
        self.turns += 1
        self.prompt_tokens += receipt.prompt_tokens
        self.cached_tokens += receipt.cached_tokens
        self.rotated_tokens += receipt.rotated_tokens
        self.prefilled_tokens += receipt.prefilled_tokens
        self.replacement_tokens += receipt.replacement_tokens
        self.drift_tokens += receipt.drift_tokens
        self.dropped_tokens += receipt.dropped_tokens
        self.graft_ms += receipt.graft_ms
        self.estimated_tokens_kept_out += kept_out
        self.executed[receipt.executed] += 1
        if receipt.reason is not None:
            self.reasons[receipt.reason] += 1
