"""Prometheus series on SGLang's own ``/metrics`` (with ``--enable-metrics``), and one log line per edited turn.

Neither holds prompt text, token ids or session ids: a session id is what lets its owner continue the session.
"""

from __future__ import annotations

import logging
from typing import Any

from leyline_client._errors import ServerError
from leyline_client._models import Executed, Receipt

from .sessions import Sessions

logger = logging.getLogger(__name__)

_GRAFT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """Counts turns. With ``enabled`` also as Prometheus series, labelled by model.

    Must be made after SGLang has set ``PROMETHEUS_MULTIPROC_DIR``: the client library picks its storage when imported.
    """

    def __init__(self, *, enabled: bool, model: str) -> None:
        self._series: dict[str, Any] | None = _series() if enabled else None
        self._model = model

    def turn(self, receipt: Receipt, sessions: Sessions) -> None:
        """A turn was answered."""
        if receipt.executed is not Executed.APPEND:
            logger.info(
                "leyline turn: executed=%s reason=%s prompt=%d cached=%d rotated=%d prefilled=%d generation=%d ms=%.2f",
                receipt.executed,
                receipt.reason,
                receipt.prompt_tokens,
                receipt.cached_tokens,
                receipt.rotated_tokens,
                receipt.prefilled_tokens,
                receipt.generation,
                receipt.graft_ms,
            )
        if self._series is None:
            return
        reason = "none" if receipt.reason is None else str(receipt.reason)
        self._series["turns"].labels(self._model, str(receipt.executed), reason).inc()
        for name in ("rotated", "prefilled", "cached", "dropped"):
            self._series[name].labels(self._model).inc(getattr(receipt, f"{name}_tokens"))
        if receipt.rotated_tokens:
            self._series["graft"].labels(self._model).observe(receipt.graft_ms / 1e3)
        self.sessions(sessions)

    def sessions(self, sessions: Sessions) -> None:
        """The number of sessions, or of those with spliced KV, may have changed."""
        if self._series is not None:
            self._series["sessions"].labels(self._model).set(len(sessions))
            self._series["lineages"].labels(self._model).set(sessions.spliced())

    def refused(self, error: ServerError) -> None:
        """A request got a typed error."""
        if self._series is not None:
            self._series["errors"].labels(self._model, error.code).inc()


def _series() -> dict[str, Any]:
    from prometheus_client import Counter, Gauge, Histogram

    def counter(name: str, text: str, *labels: str) -> Any:
        return Counter(f"leyline_{name}", text, ["model_name", *labels])

    def gauge(name: str, text: str) -> Any:
        return Gauge(f"leyline_{name}", text, ["model_name"], multiprocess_mode="livesum")

    return {
        "turns": counter(
            "turns", "Turns by what was executed, and why it differed from what was asked.", "executed", "reason"
        ),
        "rotated": counter("rotated_tokens", "Prompt tokens whose KV was moved instead of prefilled."),
        "prefilled": counter("prefilled_tokens", "Prompt tokens computed in turns of sessions."),
        "cached": counter("cached_tokens", "Prompt tokens reused in turns of sessions: prefill saved."),
        "dropped": counter("dropped_tokens", "Cached tokens dropped by forget, purge and ended sessions."),
        "errors": counter("errors", "Requests refused, by error code.", "code"),
        "graft": Histogram(
            "leyline_graft_seconds", "Scheduler time of a splice.", ["model_name"], buckets=_GRAFT_SECONDS
        ),
        "sessions": gauge("sessions", "Open sessions."),
        "lineages": gauge("lineages", "Open sessions whose KV carries operations."),
    }
