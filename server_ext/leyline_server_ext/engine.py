"""The engine as Leyline's routes see it: token ids in, token ids and counts out, through SGLang's tokenizer manager."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from leyline_client._errors import Overloaded

from . import compat
from .lineage import Lineage
from .orders import ORDER_KEY, Order, Sealer
from .plan import Plan
from .receipts import Outcome
from .sessions import Session


class Engine:
    """Sends prompts with lineage and order, and reads back what happened to them."""

    def __init__(self, manager: Any, sealer: Sealer) -> None:
        self.manager, self._sealer = manager, sealer

    def address(self, request: Any, session: Session, lineage: Lineage, order: Order) -> None:
        """Write lineage, order, salt and rank into an engine request (its own extra key is kept)."""
        request.extra_key = self._sealer.seal_lineage(lineage, session.cache_salt, request.extra_key)
        request.cache_salt = session.cache_salt
        params = dict(request.sampling_params)
        custom = dict(params.get("custom_params") or {})
        custom[ORDER_KEY] = self._sealer.seal_order(order, session.cache_salt)
        params["custom_params"] = custom
        request.sampling_params = params
        if session.dp_rank is not None:
            request.routed_dp_rank = session.dp_rank

    async def warm(self, plan: Plan, session: Session, extra_key: str | None) -> int:
        """Prefill the replacements, left to right, each on top of the edited prefix (design §5, "Replacement KV").

        Returns:
            How many tokens that computed.
        """
        computed = 0
        for length, lineage in plan.warmups:
            pieces = tuple(piece for piece in plan.order.pieces if piece.start < length)
            order = replace(plan.order, pieces=pieces, forget=(), release=(), exclusive=False)
            outcome = await self.prefill(plan.target[:length].tolist(), session, lineage, order, extra_key)
            computed += length - outcome.cached
        return computed

    async def prefill(
        self,
        ids: list[int],
        session: Session,
        lineage: Lineage,
        order: Order,
        extra_key: str | None,
        *,
        new_tokens: int = 0,
    ) -> Outcome:
        """Prefill ``ids`` and generate nothing (a report only comes with a first generated token)."""
        request = compat.openai().GenerateReqInput(
            input_ids=ids,
            sampling_params={"max_new_tokens": new_tokens, "temperature": 0.0},
            extra_key=extra_key,
            stream=False,
        )
        self.address(request, session, lineage, order)
        outcome = Outcome()
        async for _ in self.recorded(request, None, outcome):
            pass
        return outcome

    async def recorded(self, request: Any, http_request: Any, outcome: Outcome) -> AsyncIterator[Any]:
        """``generate_request`` of the engine, with what matters noted in ``outcome`` as it passes."""
        async for item in self.manager.generate_request(request, http_request):
            first = item[0] if isinstance(item, list) else item
            if isinstance(first, dict) and first.get("index", 0) == 0:
                note(outcome, first)
            yield item

    async def carry(self, session: Session, order: Order) -> Outcome:
        """Have an order carried out that belongs to no prompt: it rides on a one-token prefill.

        Raises:
            Overloaded: the engine took no request; nothing was carried out.
        """
        first = session.memory.view.ids[:1].tolist() or [0]
        outcome = await self.prefill(first, session, Lineage(), order, None, new_tokens=1)
        if not outcome.report:
            raise Overloaded("the engine aborted the request that was to drop KV")
        return outcome


def note(outcome: Outcome, item: dict[str, Any]) -> None:
    """Read one engine output (cumulative or incremental) into ``outcome``."""
    meta = item.get("meta_info") or {}
    ids = list(item.get("output_ids") or ())
    total = int(meta.get("completion_tokens") or len(ids))
    if len(ids) >= total:
        outcome.output_ids = ids[:total] if total else ids
    else:
        outcome.output_ids += ids
    outcome.cached = int(meta.get("cached_tokens") or outcome.cached)
    reports = meta.get(ORDER_KEY)
    if reports and reports[0] is not None:
        outcome.report = reports[0]
    latency = meta.get("e2e_latency")
    outcome.first_token_ms = 1e3 * latency if total <= 1 and isinstance(latency, float) else None
