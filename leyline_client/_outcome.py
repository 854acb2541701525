"""What a turn came to: its receipt, where the session stands, and what the edits saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import _calls
from ._conversation import Conversation
from ._errors import ProtocolError
from ._models import Executed, Reason, Receipt
from ._turn import Answer, TurnEngine, count_unanswered


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The ``leyline`` attribute of a reply."""

    receipt: Receipt
    session: str | None = None
    """The server's session; None where the turn went to a server without the extension and there never was one."""
    version: int = 0


def settle(engine: TurnEngine, conversation: Conversation, answer: Answer, data: Mapping[str, Any]) -> TurnResult:
    """Read the receipt out of a reply (or of a stream's last chunk) and move the conversation on."""
    if answer.plain is None and not answer.observed:
        try:
            info = _calls.turn_info(data)
        except ProtocolError:
            count_unanswered(conversation)
            raise
        receipt = info.receipt
        if answer.recovered:
            receipt = receipt.model_copy(update={"reason": Reason.SESSION_RECOVERED})
        if not answer.overtaken:
            conversation.session, conversation.version, conversation.unanswered = info.session, info.version, 0
        return TurnResult(receipt, info.session, info.version)
    return TurnResult(_plain_receipt(engine, conversation, answer, data.get("usage")), conversation.session)


def _plain_receipt(engine: TurnEngine, conversation: Conversation, answer: Answer, usage: Any) -> Receipt:
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    prompt = _count(usage.get("prompt_tokens"))
    cached = min(_count(details.get("cached_tokens")) if isinstance(details, dict) else 0, prompt)
    if not isinstance(details, dict) and conversation.turns > 1 and conversation.previous:
        engine.warn_once(
            "cache report",
            "the server does not say how many prompt tokens were cached (receipts say 0): start SGLang with "
            "--enable-cache-report",
        )
    new = answer.plan.new if not answer.observed else ()
    modes = {edit.mode for edit in new}
    return Receipt(
        requested="none" if not modes else modes.pop() if len(modes) == 1 else "mixed",
        executed=Executed.REPREFILL if new else Executed.APPEND,
        reason=answer.plain,
        prompt_tokens=prompt,
        cached_tokens=cached,
        prefilled_tokens=prompt - cached,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def kept_out(conversation: Conversation, answer: Answer, receipt: Receipt) -> int:
    """Estimate of the prompt tokens that the standing edits kept (observe: would have kept) out of a turn."""
    written = sum(map(len, conversation.fragments))
    sent = written if answer.observed else written - conversation.freed
    return max(0, round(conversation.freed * receipt.prompt_tokens / sent)) if sent > 0 else 0
