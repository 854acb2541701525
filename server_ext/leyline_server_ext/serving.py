"""SGLang's own chat completion handler, with a turn slipped in between rendering and generating.

Everything OpenAI (templates, tools, parsers, logprobs, streaming) stays SGLang's: the subclass only looks at the
rendered prompt, has the replacements prefilled, writes lineage and order into the engine request, and listens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from pydantic import PrivateAttr

from leyline_client._errors import Unsupported

from . import compat
from .changes import OnHistoryEdit
from .engine import Engine
from .plan import as_ids
from .render import spans
from .turns import Turn

_UNSUPPORTED_FIELDS = ("input_ids", "session_id", "lora_path")
"""Fields of SGLang's own body that bypass the prompt or the cache namespace a session stands on."""


@cache
def request_class() -> Any:
    """SGLang's chat request, carrying its turn."""
    base: Any = compat.openai().ChatCompletionRequest

    class LeylineChatRequest(base):
        """A chat request in a session."""

        _leyline: Any = PrivateAttr(default=None)

    return LeylineChatRequest


@cache
def _serving_class(base: Any) -> Any:
    class LeylineServingChat(base):
        """`TurnServing` plugged into SGLang's handler."""

        def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> Any:
            adapted, request = super()._convert_to_internal_request(request, raw_request)
            if request._leyline is not None:
                request._leyline.rendered(self, request, adapted)
            return adapted, request

        async def _handle_streaming_request(self, adapted: Any, request: Any, raw_request: Any) -> Any:
            if request._leyline is not None:
                await request._leyline.prepare(adapted)
            return await super()._handle_streaming_request(adapted, request, raw_request)

        async def _handle_non_streaming_request(self, adapted: Any, request: Any, raw_request: Any) -> Any:
            if request._leyline is not None:
                await request._leyline.prepare(adapted)
            return await super()._handle_non_streaming_request(adapted, request, raw_request)

    return LeylineServingChat


class ListeningManager:
    """The tokenizer manager, with the outputs of leyline requests noted as they pass."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._manager = engine, engine.manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def generate_request(self, request: Any, http_request: Any = None) -> AsyncIterator[Any]:
        """As the manager's."""
        chat = getattr(request, "leyline_chat", None)
        if chat is None:
            return self._manager.generate_request(request, http_request)
        return self._engine.recorded(request, http_request, chat.turn.outcome)


def serving_chat(engine: Engine, template_manager: Any) -> Any:
    """A chat handler that understands `request_class` requests."""
    return _serving_class(engine.manager.serving_chat_class)(ListeningManager(engine), template_manager)


class Chat:
    """What a chat request carries through SGLang's handler.

    Args:
        turn: the turn in progress.
        engine: where replacements are prefilled.
        messages: the conversation as the agent wrote it (the request itself holds the edited one).
        on_history_edit: mode of undeclared changes.
    """

    def __init__(
        self, turn: Turn, engine: Engine, messages: list[dict[str, Any]], on_history_edit: OnHistoryEdit
    ) -> None:
        self.turn, self._engine, self._messages, self._on_history_edit = turn, engine, messages, on_history_edit
        self.error: Exception | None = None

    def rendered(self, serving: Any, request: Any, adapted: Any) -> None:
        """The prompt is there (worker thread): plan. An error is kept for the route, SGLang would reword it."""
        try:
            refuse_unsupported(request, adapted)
            if adapted.input_ids is None:
                adapted.input_ids = encode(self._engine.manager.tokenizer, adapted.text)
                adapted.text = None
            adapted.leyline_chat = self
            ids = list(adapted.input_ids)
            self.turn.plan_messages(
                as_ids(ids),
                self._messages,
                self._on_history_edit,
                lambda: message_spans(serving, request, ids, self._engine.manager.tokenizer)[0],
            )
        except Exception as error:
            self.error = error
            raise

    async def prepare(self, adapted: Any) -> None:
        """Replacements first, then the request's own lineage and order."""
        try:
            await self.turn.prepare(self._engine, adapted)
        except Exception as error:
            self.error = error
            raise


def refuse_unsupported(request: Any, adapted: Any) -> None:
    """Raise `Unsupported` for a request whose KV is not a function of its tokens alone."""
    if adapted.image_data or adapted.video_data or adapted.audio_data:
        raise Unsupported("multimodal prompts cannot be spliced", param="messages", detail={"reason": "multimodal"})
    for name in _UNSUPPORTED_FIELDS:
        if getattr(request, name, None) is not None:
            raise Unsupported(
                f"{name} cannot be used in a session", param=name, detail={"reason": "unsupported_request"}
            )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenise rendered text; the template has written the special tokens already."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def rendered_ids(serving: Any, request: Any, messages: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    """Token ids that ``messages`` render to with everything else as in ``request``."""
    body = {**request.model_dump(exclude_none=True), "messages": messages}
    ids = serving._process_messages(type(request).model_validate(body), False).prompt_ids
    return encode(tokenizer, ids) if isinstance(ids, str) else list(ids)


def message_spans(serving: Any, request: Any, ids: list[int], tokenizer: Any, only: set[int] | None = None) -> Any:
    """Spans of the request's (edited) messages in its rendered ``ids``; see `leyline_server_ext.render.spans`."""
    messages = request.model_dump(exclude_none=True)["messages"]

    def render(marked: list[dict[str, Any]]) -> list[int]:
        return rendered_ids(serving, request, marked, tokenizer)

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def offsets(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    return spans(messages, ids, render=render, decode=decode, offsets=offsets, only=only)
