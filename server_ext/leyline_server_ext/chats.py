"""Message-level turns: the chat request's body, its edits, and its reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leyline_client._edits import apply_edits
from leyline_client._errors import InvalidRequest
from leyline_client._models import Reason, TurnInfo, TurnOptions
from leyline_client._wire import RenderReply, RenderRequest

from .engine import Engine
from .rates import Rates
from .serving import Chat, message_spans, rendered_ids, request_class
from .turns import Turn
from .validation import parse


class ChatTurn(Chat):
    """A chat turn with the options and the engine request it came with."""

    def __init__(
        self,
        turn: Turn,
        engine: Engine,
        messages: list[dict[str, Any]],
        options: TurnOptions,
        request: Any,
        rates: Rates,
    ) -> None:
        super().__init__(turn, engine, messages, options.on_history_edit)
        self.options, self.request, self._rates = options, request, rates
        request._leyline = self

    def rendered(self, serving: Any, request: Any, adapted: Any) -> None:
        """Plan; with ``veto_unprofitable`` plan again without this turn's new edits where they do not pay."""
        super().rendered(serving, request, adapted)
        new = [edit for edit in self.turn.edits if edit not in self.turn.session.memory.edits]
        if not self.options.veto_unprofitable or not new or self._rates.predict(self.turn).worth_it:
            return
        self.turn.edits = tuple(edit for edit in self.turn.edits if edit not in new)
        self.turn.reason = Reason.VETOED
        adapted.input_ids = rendered_ids(
            serving, request, apply_edits(self._messages, self.turn.edits), self._engine.manager.tokenizer
        )
        super().rendered(serving, request, adapted)


def read_chat(body: dict[str, Any]) -> tuple[TurnOptions, list[dict[str, Any]], Any, str | None]:
    """Options, the messages as the agent wrote them, SGLang's request over the edited ones, and the cache salt.

    Raises:
        InvalidRequest, InvalidEdit: naming the field.
    """
    options = parse(TurnOptions, body.get("leyline") or {}, "leyline")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("a non-empty list of message objects is needed", param="messages")
    rest = {name: value for name, value in body.items() if name not in ("leyline", "messages")}
    request = parse(request_class(), {**rest, "messages": apply_edits(messages, options.edits)})
    salt = body.get("cache_salt")
    return options, messages, request, salt if isinstance(salt, str) and salt else None


def rendered_prompt(serving: Any, request: Any) -> tuple[list[int], Any]:
    """The prompt's token ids through SGLang's own rendering, and the converted request."""
    adapted, request = serving._convert_to_internal_request(request)
    return list(adapted.input_ids), request


def render(serving: Any, tokenizer: Any, wanted: RenderRequest) -> RenderReply:
    """``POST render``."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": apply_edits(wanted.messages, wanted.edits),
        "tools": wanted.tools or None,
        "chat_template_kwargs": wanted.chat_template_kwargs,
        "add_generation_prompt": None if wanted.add_generation_prompt else False,
    }
    parsed = parse(request_class(), {name: value for name, value in body.items() if value is not None})
    try:
        ids, parsed = rendered_prompt(serving, parsed)
    except ValueError as error:
        raise InvalidRequest(str(error), param="messages") from None
    found, exact = message_spans(serving, parsed, ids, tokenizer)
    return RenderReply(
        prompt_tokens=len(ids), token_ids=ids if wanted.return_token_ids else None, spans=found, exact=exact
    )


def reply_with_turn(response: Any, finish: Callable[[], TurnInfo]) -> Any:
    """The engine's reply with ``leyline``; its error responses pass unchanged."""
    from fastapi.responses import JSONResponse

    if not hasattr(response, "model_dump"):
        return response
    reply = response.model_dump(mode="json")
    if "choices" not in reply:
        return JSONResponse(reply, status_code=int(reply.get("code") or 400))
    reply["leyline"] = finish().model_dump(mode="json")
    return reply
