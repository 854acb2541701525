"""`FakeServer`: the wire protocol without a model, in the process or on a real port."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pydantic

from leyline_client._errors import (
    InternalError,
    InvalidDirective,
    InvalidEdit,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unsupported,
    error_body,
)
from leyline_client._http import PREFIX
from leyline_client._models import MAX_DIRECTIVES, MAX_TOKENS, PROTOCOL_VERSION, Mode, Model, Receipt, TurnOptions
from leyline_client._version import __version__
from leyline_client._wire import (
    Limits,
    PlanReply,
    RenderRequest,
    RopeInfo,
    ServerInfo,
    SpliceReply,
    SpliceRequest,
    TokenizerInfo,
)
from leyline_client.policy._bpe import essence

from ._engine import FakeEngine, Prepared
from ._faults import FakeReply, Fault, FaultRaised
from ._replies import ReplyBuilder, Script, ScriptExhausted, Step
from ._serve import AsyncFakeTransport, FakeTransport, serving
from ._toy import Piece, flatten


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as the server saw it."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    messages: Sequence[Mapping[str, Any]]
    """The edited messages: what the model was shown."""
    receipt: Receipt | None
    """None for a plain ``/v1`` request."""


M = TypeVar("M", bound=Model)


class FakeServer:
    """An SGLang server with the Leyline extension, as far as a client can see.

    Tokens are counted by a toy tokenizer; cached, rotated and prefilled ones are accounted for as a real server would
    if its cache never evicted. Versions, typed refusals and recovery behave as on the wire.

    Args:
        replies: One step per turn; a turn without a step fails, and leaving ``with`` raises `UnconsumedSteps` where
            steps are left. None: every turn answers ``ok N``.
        extension: False mimics plain SGLang.
        enabled: False mimics an extension that refuses to splice; ``refusals`` says why.
        cache_report: False mimics a server started without ``--enable-cache-report``.
        api_key: The key requests must bring.
        max_sessions: Bound of the sessions held.
        tokenizer: The content of a ``tokenizer.json`` for clients to count with. None: the toy tokenizer, which is no
            byte-level BPE, so clients estimate.

    Use ``LeylineClient("http://fake", transport=server.transport)``, `async_transport`, or `serve` for a real port.
    """

    def __init__(
        self,
        replies: Sequence[Step] | None = None,
        *,
        extension: bool = True,
        enabled: bool = True,
        refusals: Sequence[str] = (),
        cache_report: bool = True,
        api_key: str | None = None,
        max_sessions: int = 64,
        tokenizer: Mapping[str, Any] | None = None,
    ) -> None:
        self.turns: list[Turn] = []
        """Every generating request that was carried out, in order."""
        self.requests: list[tuple[str, str]] = []
        """(method, path) of every request, also of those that failed."""
        self._script = Script(replies)
        self._extension, self._cache_report, self._api_key = extension, cache_report, api_key
        self._enabled, self._refusals, self._max_sessions = enabled, tuple(refusals), max_sessions
        self._engine = FakeEngine(max_sessions)
        self._vocabulary = None if tokenizer is None else essence(tokenizer)
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def inject(self, *faults: Fault | str) -> None:
        """Let the next generating or session-changing requests go wrong, one each."""
        self._faults += [Fault(fault) for fault in faults]

    @property
    def sessions(self) -> list[str]:
        """Ids of the sessions held."""
        return list(self._engine.sessions)

    @property
    def transport(self) -> FakeTransport:
        """An httpx transport for `LeylineClient`, `LeylineSession` or ``httpx.Client``."""
        return FakeTransport(self)

    @property
    def async_transport(self) -> AsyncFakeTransport:
        """The same for asyncio."""
        return AsyncFakeTransport(self)

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve on a free local port: ``with server.serve() as url``. Leaving checks the script, as ``with`` does."""
        with self, serving(self) as url:
            yield url

    def count_tokens(self, text: str) -> int:
        """Tokens of ``text``."""
        return len(self._engine.tokenizer.encode(text))

    def check(self) -> None:
        """Raise `UnconsumedSteps` where scripted steps, or faults, are left."""
        self._script.check()
        if self._faults:
            raise AssertionError(f"faults were not met: {', '.join(self._faults)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.check()

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> FakeReply:
        """Answer one request; ``target`` is path and query. Raises `FaultRaised` for the transport to mimic."""
        url = urlsplit(target)
        with self._lock:
            self.requests.append((method, url.path))
            try:
                return self._route(method, url.path, dict(parse_qsl(url.query)), headers, body)
            except ServerError as error:
                return _json(error.http_status, error_body(error))
            except ScriptExhausted as error:
                return _json(500, error_body(InternalError(str(error))))

    def _route(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> FakeReply:
        if self._api_key is not None and headers.get("authorization") != f"Bearer {self._api_key}":
            return _json(401, {"error": "Unauthorized"})
        if (method, path) == ("GET", "/v1/models"):
            return _json(200, {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "leyline"}]})
        if (method, path) == ("POST", "/v1/chat/completions"):
            return self._guarded(lambda: self._plain(path, headers, body))
        if not path.startswith(PREFIX + "/") or not self._extension:
            return _json(404, {"detail": "Not Found"})
        name = path.removeprefix(PREFIX + "/")
        if (method, name) == ("GET", "info"):
            return _json(200, self._info())
        if method == "GET" and name.startswith("tokenizer"):
            return self._tokenizer(name)
        if method == "POST" and name == "render":
            return _json(200, self._engine.render(_validated(RenderRequest, _object(body))))
        if method == "POST" and name == "plan":
            return _json(200, self._plan(_object(body)))
        if method == "POST" and name == "chat/completions":
            return self._guarded(lambda: self._chat(path, headers, body))
        if method == "POST" and name == "splice":
            return self._guarded(lambda: self._splice(path, headers, body))
        if name.startswith("sessions/"):
            return self._guarded(lambda: self._session(method, name.split("/")[1:], query, body))
        return _json(404, {"detail": "Not Found"})

    def _guarded(self, answer: Any) -> FakeReply:
        """Answer, with the next injected fault."""
        fault = self._faults.pop(0) if self._faults else None
        if fault is Fault.REFUSE:
            raise FaultRaised(fault)
        if fault is Fault.OVERLOADED:
            raise Overloaded("injected")
        if fault is Fault.LOSE_SESSIONS:
            self._engine.sessions.clear()
        try:
            reply: FakeReply = answer()
        except ServerError:
            if fault is not None and fault is not Fault.LOSE_SESSIONS:
                # Nothing was carried out whose reply could be lost: the fault waits for a turn that is.
                self._faults.insert(0, fault)
            raise
        if fault in {Fault.DROP_REPLY, Fault.TIMEOUT}:
            raise FaultRaised(fault)
        if fault is Fault.CUT_STREAM:
            if isinstance(reply.body, bytes):
                raise FaultRaised(Fault.DROP_REPLY)
            return FakeReply(reply.status, _cut(reply.body), reply.content_type)
        return reply

    def _chat(self, path: str, headers: Mapping[str, str], content: bytes) -> FakeReply:
        body = _object(content)
        if refusal := _engine_refusal(body):
            return refusal
        options = _options(body)
        turn = self._engine.prepare_chat(body, options)
        return self._answer(path, headers, body, turn)

    def _answer(self, path: str, headers: Mapping[str, str], body: dict[str, Any], turn: Prepared) -> FakeReply:
        builder = ReplyBuilder(
            len(self.turns) + 1, body, self._script.take(), turn.receipt.prompt_tokens, turn.receipt.cached_tokens
        )
        reply = self._engine.template.reply(builder.message)
        info = self._engine.commit(turn, reply).model_dump(mode="json")
        self.turns.append(Turn(path, body, dict(headers), turn.messages, turn.receipt))
        if body.get("stream"):
            return FakeReply(200, builder.stream(len(flatten(reply)), info), "text/event-stream")
        return _json(200, builder.reply(len(flatten(reply)), info))

    def _plain(self, path: str, headers: Mapping[str, str], content: bytes) -> FakeReply:
        body = _object(content)
        if refusal := _engine_refusal(body):
            return refusal
        pieces, cached = self._engine.clean_tokens(body)
        builder = ReplyBuilder(
            len(self.turns) + 1,
            body,
            self._script.take(),
            len(flatten(pieces)),
            cached if self._cache_report and cached else None,
        )
        reply = self._engine.template.reply(builder.message)
        self._engine.remember(body, [*pieces, *reply])
        self.turns.append(Turn(path, body, dict(headers), body["messages"], None))
        if body.get("stream"):
            return FakeReply(200, builder.stream(len(flatten(reply)), None), "text/event-stream")
        return _json(200, builder.reply(len(flatten(reply)), None))

    def _splice(self, path: str, headers: Mapping[str, str], content: bytes) -> FakeReply:
        body = _object(content)
        turn = self._engine.prepare_splice(_validated(SpliceRequest, body))
        text = str(self._script.take().get("content") or "")
        output = self._engine.tokenizer.encode(text)
        info = self._engine.commit(turn, [Piece(tuple(output))])
        self.turns.append(Turn(path, body, dict(headers), (), turn.receipt))
        return _json(200, SpliceReply(**dict(info), output_ids=output, text=text, finish_reason="stop"))

    def _plan(self, body: dict[str, Any]) -> PlanReply:
        if "messages" in body:
            turn = self._engine.prepare_chat(body, _options(body))
        else:
            turn = self._engine.prepare_splice(_validated(SpliceRequest, body))
        kept = min((d.start for d in turn.receipt.directives), default=turn.receipt.cached_tokens)
        saved = turn.receipt.cached_tokens - kept
        return PlanReply(receipt=turn.receipt, worth_it=saved >= 0, saved_prefill_tokens=saved)

    def _session(self, method: str, parts: Sequence[str], query: Mapping[str, str], content: bytes) -> FakeReply:
        salt = query.get("cache_salt")
        if len(parts) == 1 and method == "GET":
            return _json(200, self._engine.view(parts[0], salt))
        if len(parts) == 1 and method == "DELETE":
            self._engine.delete(parts[0], salt)
            return FakeReply(204, b"")
        if len(parts) == 2 and method == "POST" and parts[1] in {"undo", "purge"}:
            version = _object(content).get("expected_version")
            operation = self._engine.undo if parts[1] == "undo" else self._engine.purge
            return _json(200, operation(parts[0], salt, version))
        return _json(404, {"detail": "Not Found"})

    def _tokenizer(self, name: str) -> FakeReply:
        if self._vocabulary is None:
            raise Unsupported("the toy tokenizer is no byte-level BPE", detail={"reason": "tokenizer"})
        digest = hashlib.sha256(self._vocabulary).hexdigest()
        if name == "tokenizer":
            return _json(200, TokenizerInfo(digest=digest, size=len(self._vocabulary)))
        if name != f"tokenizer/{digest}":
            raise InvalidRequest("the server counts with another vocabulary", param="digest")
        return FakeReply(200, self._vocabulary)

    def _info(self) -> ServerInfo:
        return ServerInfo(
            protocol=PROTOCOL_VERSION,
            extension_version=__version__,
            sglang_version="0.5.23",
            model="fake",
            enabled=self._enabled,
            refusals=self._refusals,
            modes=tuple(Mode) if self._enabled else (),
            page_size=1,
            context_length=1 << 20,
            vocab_size=MAX_TOKENS,
            kv_dtype="bfloat16",
            rope=RopeInfo(kind="mha", rotary_dim=64, interleaved=False, layers=2, nope_layers=0),
            limits=Limits(
                max_directives=MAX_DIRECTIVES,
                max_tokens=MAX_TOKENS,
                max_sessions=self._max_sessions,
                session_ttl_s=3600.0,
            ),
        )


def _json(status: int, data: Model | Mapping[str, Any]) -> FakeReply:
    text = data.model_dump_json() if isinstance(data, Model) else json.dumps(data)
    return FakeReply(status, text.encode())


def _object(content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except ValueError as error:
        raise InvalidRequest("the body is no JSON") from error
    if not isinstance(data, dict):
        raise InvalidRequest("the body is no JSON object")
    return data


def _options(body: Mapping[str, Any]) -> TurnOptions:
    return _validated(TurnOptions, body.get("leyline") or {}, "leyline")


def _validated(model: type[M], data: Any, prefix: str = "") -> M:
    """``data`` as a model, or a refusal whose ``param`` is the dotted path of the first fault."""
    try:
        return model.model_validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = prefix
        for part in first["loc"]:
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
        kind = InvalidEdit if "edits[" in path else InvalidDirective if "directives[" in path else InvalidRequest
        raise kind(first["msg"], param=path or None) from error


def _engine_refusal(body: Mapping[str, Any]) -> FakeReply | None:
    """The engine's own check of an OpenAI body, in its own words and shape."""
    messages = body.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and m.get("role") for m in messages):
        return None
    error = {"object": "error", "message": "messages: must be a list of messages", "type": "BadRequest", "code": 400}
    return _json(400, error)


def _cut(chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield next(chunks)
    raise FaultRaised(Fault.CUT_STREAM)
