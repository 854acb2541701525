"""The seam between debug-gym's agents and anything with ``chat.completions.create``: a session or an OpenAI client.

debug-gym calls ``_perform_chat_completion`` once per attempt. Every attempt of a turn sends an equal copy of the same
request, so a session that plans its edits from the messages, and takes them as done only when a reply comes, plans the
same edits again: retries are idempotent. Assistant turns are replayed as the server gave them; debug-gym would turn a
null content into ``"None"`` and re-serialise the arguments, which breaks the cached prefix and looks like an edited
history.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
from openai.types.chat import ChatCompletion

from leyline_evals.gym import _debug_gym as dg
from leyline_evals.gym.env import QuietLogger
from leyline_evals.gym.replies import TimedReply, timed_reply
from leyline_evals.gym.script import Script, ScriptError

UNPARSABLE = "unparsable_arguments"
"""Name of the tool call that stands for one whose arguments were not a JSON object."""

_CONTEXT_WORDS = ("maximum context length", "context length", "maximum allowed length", "longer than the model")


class ServerDownError(RuntimeError):
    """The server cannot be reached, or has no Leyline extension although the arm needs it."""


class ContextExceededError(RuntimeError):
    """The prompt no longer fits the model."""


class LeylineLLM(dg.OpenAILLM):
    """Sends every request through ``session.chat.completions.create`` and keeps what came back.

    Args:
        session: The object to call.
        model: The model's name in the request.
        request_options: More arguments of every request (temperature, seed, max_tokens, extra_body).
        stream: Ask for streamed replies, which makes the time to first token measurable.
        max_attempts: Tries of one request before its error is raised; waits grow exponentially between them.

    After each turn ``last_reply`` and ``attempts`` describe it.
    """

    def __init__(
        self,
        session: Any,
        model: str = "default",
        *,
        request_options: dict[str, Any] | None = None,
        stream: bool = False,
        max_attempts: int = 3,
    ) -> None:
        config = dg.LLMConfig(model=model, context_limit=1_000_000, generate_kwargs=dict(request_options or {}))
        super().__init__(model, config, logger=QuietLogger())
        self.session = session
        self.stream = stream
        self.max_attempts = max_attempts
        self.attempts = 0
        self.last_reply: TimedReply | None = None

    def tokenize(self, messages: list[dict[str, Any]]) -> list[list[str]]:
        """Offline stand-in for tiktoken, which would download its vocabulary. Nothing here depends on the count."""
        return [list(str(message.get("content") or "")) for message in messages]

    def generate(self, messages: list[dict[str, Any]], tools: list[Any], **kwargs: Any) -> Any:
        """One turn. The result's ``message`` is the assistant message to replay.

        Raises:
            ServerDownError: when the server cannot be reached after ``max_attempts`` tries.
            ContextExceededError: when the prompt does not fit the model.
        """
        self.attempts = 0
        try:
            response = super().generate(messages, tools, **kwargs)
        except Exception as error:
            if _is_unreachable(error):
                raise ServerDownError(f"no usable answer from the server: {_describe(error)}") from error
            if any(self.is_context_length_error(cause) for cause in _chain(error)):
                raise ContextExceededError(_describe(error)) from error
            raise
        assert self.last_reply is not None
        response.message = replayable(self.last_reply.body["choices"][0]["message"])
        return response

    def _perform_chat_completion(self, **kwargs: Any) -> Any:
        self.attempts += 1
        request = copy.deepcopy({key: value for key, value in kwargs.items() if not isinstance(value, openai.NotGiven)})
        self.last_reply = timed_reply(self.session.chat.completions.create, request, stream=self.stream)
        body = dict(self.last_reply.body)
        body["usage"] = body.get("usage") or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return ChatCompletion.construct(**body)

    def need_to_be_retried(self, exception: BaseException) -> bool:
        """Whether another attempt may help: connection failures, timeouts, rate limits and 5xx, a bounded number."""
        if self.attempts >= self.max_attempts or self.is_context_length_error(exception):
            return False
        status = getattr(exception, "status_code", None) or getattr(exception, "http_status", None)
        return _is_unreachable(exception) or (isinstance(status, int) and (status == 429 or status >= 500))

    def is_context_length_error(self, exception: BaseException) -> bool:
        """Whether the server refused the prompt for its length."""
        return any(words in str(exception).lower() for words in _CONTEXT_WORDS)

    def parse_tool_call_response(self, response: Any) -> Any:
        """As upstream, but a call with broken arguments becomes one the agent can be told about."""
        if response is None:
            return super().parse_tool_call_response(None)
        try:
            arguments = json.loads(response.function.arguments or "{}")
        except (json.JSONDecodeError, TypeError):
            arguments = None
        if not isinstance(arguments, dict):
            return dg.ToolCall(id=response.id, name=UNPARSABLE, arguments={"tool": response.function.name})
        return dg.ToolCall(id=response.id, name=response.function.name, arguments=arguments)


class ScriptedThroughServerLLM(LeylineLLM):
    """Really sends every request, and then acts as the script says.

    So the cost of an arm can be measured with any model, however small. The turn is read off the messages (how many
    assistant turns they hold), not counted, so a repeated call gives the same action.
    """

    def __init__(self, session: Any, script: Script, model: str = "default", **options: Any) -> None:
        request_options = {"max_tokens": 1, **(options.pop("request_options", None) or {})}
        super().__init__(session, model, request_options=request_options, **options)
        self.script = script

    def generate(self, messages: list[dict[str, Any]], tools: list[Any], **kwargs: Any) -> Any:
        """One turn: the server's reply is measured and dropped.

        Raises:
            ScriptError: when the script has no more steps.
        """
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn >= len(self.script.steps):
            raise ScriptError(f"{self.script.task}: the script ends after {turn} steps, the task goes on")
        response = super().generate(messages, tools, **kwargs)
        step = self.script.steps[turn]
        response.message = self.script.assistant_message(turn)
        response.response = step.say
        response.tool = dg.ToolCall(self.script.call_id(turn), step.tool, copy.deepcopy(step.arguments))
        return response


def replayable(message: dict[str, Any]) -> dict[str, Any]:
    """The assistant message to put into the history: as received, without null fields, with its first call only.

    Only the first call is executed, and a call without a result would break the pairing.
    """
    kept = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        kept["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        call = message["tool_calls"][0]
        kept["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")}]
    return kept


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _is_unreachable(error: BaseException) -> bool:
    network = (openai.APIConnectionError, httpx.TransportError, ConnectionError)
    # The client's own classes are known by name: this package must work without the client too.
    names = ("ServerUnreachable", "ServerTimeout", "ExtensionMissing")
    return any(isinstance(cause, network) or type(cause).__name__ in names for cause in _chain(error))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
