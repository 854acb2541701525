"""Scripted replies: what a test says the model answers, as OpenAI replies and streams."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from leyline_client._errors import LeylineError, ServerError
from leyline_client._sse import DONE, encode_chunk

from ._toy import ToyTokenizer

Step: TypeAlias = "str | Mapping[str, Any] | ServerError"
"""One scripted turn: the answer's text, its message fields (``content``, ``tool_calls``, ``reasoning_content``,
``finish_reason``), or a refusal."""

_CREATED = 1_700_000_000


def tool_call(name: str, arguments: Mapping[str, Any] | str, call_id: str | None = None) -> dict[str, Any]:
    """An OpenAI tool call, to be put into a scripted reply's ``tool_calls``."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    identity = call_id or f"call_{next(_numbers)}"
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


_numbers = itertools.count(1)


class UnconsumedSteps(AssertionError):
    """A script was not played to its end."""


class Script:
    """The steps still to be played. Without steps every turn answers ``ok N``."""

    def __init__(self, steps: Sequence[Step] | None) -> None:
        self._steps = None if steps is None else list(steps)
        self._played = 0

    def take(self) -> Mapping[str, Any]:
        """The next turn's message fields. Raises the step where it is a refusal."""
        self._played += 1
        if self._steps is None:
            return {"content": f"ok {self._played}"}
        if not self._steps:
            raise ScriptExhausted(f"the script has {self._played - 1} steps; this is request {self._played}")
        step = self._steps.pop(0)
        if isinstance(step, ServerError):
            raise step
        return {"content": step} if isinstance(step, str) else step

    def check(self) -> None:
        """Raise `UnconsumedSteps` where steps are left."""
        if self._steps:
            raise UnconsumedSteps(f"{len(self._steps)} scripted steps were not played, after {self._played} that were")


class ScriptExhausted(LeylineError):
    """More turns were asked for than the script has steps."""


class ReplyBuilder:
    """One reply in both shapes."""

    def __init__(self, number: int, body: Mapping[str, Any], step: Mapping[str, Any], tokens: int, cached: int | None):
        self._head = {
            "id": f"chatcmpl-{number}",
            "created": _CREATED + number,
            "model": str(body.get("model") or "fake"),
        }
        self._body = body
        self.message = {
            "role": "assistant",
            "content": step.get("content"),
            **{k: v for k, v in step.items() if k not in {"content", "finish_reason", "role"}},
        }
        self._finish = step.get("finish_reason") or ("tool_calls" if step.get("tool_calls") else "stop")
        self._tokens, self._cached = tokens, cached

    def usage(self, completion: int) -> dict[str, Any]:
        """OpenAI's usage; the cached tokens are null without a cache report, as with SGLang."""
        return {
            "prompt_tokens": self._tokens,
            "completion_tokens": completion,
            "total_tokens": self._tokens + completion,
            "prompt_tokens_details": None if self._cached is None else {"cached_tokens": self._cached},
        }

    def reply(self, completion: int, leyline: Mapping[str, Any] | None) -> dict[str, Any]:
        """``chat.completion``."""
        choices = [
            {
                "index": index,
                "message": self.message,
                "finish_reason": self._finish,
                "logprobs": self._logprobs(str(self.message["content"] or "")),
            }
            for index in range(self._body.get("n") or 1)
        ]
        data = {**self._head, "object": "chat.completion", "choices": choices, "usage": self.usage(completion)}
        return data if leyline is None else {**data, "leyline": dict(leyline)}

    def stream(self, completion: int, leyline: Mapping[str, Any] | None) -> Iterator[bytes]:
        """``chat.completion.chunk`` events."""
        for index in range(self._body.get("n") or 1):
            for delta, logprobs in self._deltas():
                yield self._chunk([{"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs}])
            yield self._chunk([{"index": index, "delta": {}, "finish_reason": self._finish, "logprobs": None}])
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield self._chunk([], usage=self.usage(completion))
        if leyline is not None:
            yield self._chunk([], leyline=dict(leyline))
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return encode_chunk({**self._head, "object": "chat.completion.chunk", "choices": choices, **more})

    def _deltas(self) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        yield {"role": "assistant", "content": ""}, None
        for name in ("reasoning_content", "content"):
            for piece in _pieces(self.message.get(name) or ""):
                yield {name: piece}, self._logprobs(piece) if name == "content" else None
        for index, call in enumerate(self.message.get("tool_calls") or ()):
            arguments = call["function"]["arguments"]
            half = len(arguments) // 2
            first = {"name": call["function"]["name"], "arguments": arguments[:half]}
            yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": first}]}, None
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]}, None

    def _logprobs(self, text: str) -> dict[str, Any] | None:
        if not self._body.get("logprobs"):
            return None
        entries = [
            {"token": piece, "logprob": -0.5, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece in _pieces(text)
        ]
        return {"content": entries, "refusal": None}


def _pieces(text: str) -> list[str]:
    tokenizer = ToyTokenizer()
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]
