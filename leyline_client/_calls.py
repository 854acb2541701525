"""Every route as a pure pair (request, how to read its reply): the half both clients share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pydantic

from ._errors import ConfigurationError, ProtocolError
from ._http import DEFAULT_TIMEOUT, PREFIX, SHORT_TIMEOUT, Reply, Request, Timeout
from ._models import PROTOCOL_VERSION, Edit, Model, TurnInfo, TurnOptions
from ._wire import (
    PlanReply,
    RenderReply,
    RenderRequest,
    ServerInfo,
    SessionView,
    SpliceReply,
    SpliceRequest,
    TokenizerInfo,
)

T = TypeVar("T")
M = TypeVar("M", bound=Model)
Message = Mapping[str, Any]

CHAT = PREFIX + "/chat/completions"
PLAIN_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and the reading of its reply."""

    request: Request
    parse: Callable[[Reply], T]


def info() -> Call[ServerInfo]:
    """``GET info``."""
    return Call(Request("GET", f"{PREFIX}/info", timeout=SHORT_TIMEOUT), _info)


def tokenizer() -> Call[TokenizerInfo]:
    """``GET tokenizer``."""
    return Call(Request("GET", f"{PREFIX}/tokenizer", timeout=SHORT_TIMEOUT), _model(TokenizerInfo))


def vocabulary(wanted: TokenizerInfo) -> Call[bytes]:
    """``GET tokenizer/{digest}``. Some megabytes: the timeout is that of a long answer."""

    def parse(reply: Reply) -> bytes:
        if hashlib.sha256(reply.content).hexdigest() != wanted.digest:
            raise ProtocolError("the server's vocabulary is not the one it announced")
        return reply.content

    return Call(Request("GET", f"{PREFIX}/tokenizer/{wanted.digest}"), parse)


def render(
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    add_generation_prompt: bool,
    edits: Sequence[Edit],
    return_token_ids: bool,
) -> Call[RenderReply]:
    """``POST render``."""
    body = _build(
        RenderRequest,
        messages=[dict(message) for message in messages],
        tools=None if tools is None else [dict(tool) for tool in tools],
        chat_template_kwargs=None if chat_template_kwargs is None else dict(chat_template_kwargs),
        add_generation_prompt=add_generation_prompt,
        edits=tuple(edits),
        return_token_ids=return_token_ids,
    )
    return Call(_post("render", body.model_dump(mode="json"), SHORT_TIMEOUT), _model(RenderReply))


def plan(body: Mapping[str, Any] | SpliceRequest, options: TurnOptions | None) -> Call[PlanReply]:
    """``POST plan`` for a turn of either kind."""
    if isinstance(body, SpliceRequest):
        if options is not None:
            raise ConfigurationError("a token-level plan takes no TurnOptions: its request says all")
        return Call(_post("plan", body.model_dump(mode="json"), SHORT_TIMEOUT), _model(PlanReply))
    return Call(_post("plan", with_options(body, options), SHORT_TIMEOUT), _model(PlanReply))


def splice(request: SpliceRequest, timeout: Timeout) -> Call[SpliceReply]:
    """``POST splice``."""
    return Call(_post("splice", request.model_dump(mode="json"), timeout), _model(SpliceReply))


def chat(body: Mapping[str, Any], options: TurnOptions | None, timeout: Timeout) -> Call[dict[str, Any]]:
    """``POST chat/completions``; streaming where the body says so."""
    return Call(_post("chat/completions", with_options(body, options), timeout, bool(body.get("stream"))), json_object)


def undo(session: str, expected_version: int | None, cache_salt: str | None) -> Call[TurnInfo]:
    """``POST sessions/{id}/undo``."""
    return _operation(session, "undo", expected_version, cache_salt)


def purge(session: str, expected_version: int | None, cache_salt: str | None) -> Call[TurnInfo]:
    """``POST sessions/{id}/purge``."""
    return _operation(session, "purge", expected_version, cache_salt)


def get_session(session: str, cache_salt: str | None) -> Call[SessionView]:
    """``GET sessions/{id}``."""
    request = Request("GET", _session_path(session), query=_salt(cache_salt), timeout=SHORT_TIMEOUT)
    return Call(request, _model(SessionView))


def delete_session(session: str, cache_salt: str | None) -> Call[None]:
    """``DELETE sessions/{id}``."""
    request = Request("DELETE", _session_path(session), query=_salt(cache_salt), timeout=SHORT_TIMEOUT)
    return Call(request, lambda _: None)


def with_options(body: Mapping[str, Any], options: TurnOptions | None) -> dict[str, Any]:
    """The body with its ``leyline`` object."""
    if options is None:
        return dict(body)
    if "leyline" in body:
        raise ConfigurationError("give options= or body['leyline'], not both")
    return {**body, "leyline": options.model_dump(mode="json")}


def json_object(reply: Reply) -> dict[str, Any]:
    """The reply's JSON object. Raises `ProtocolError` for anything else."""
    data = reply.json()
    if not isinstance(data, dict):
        raise ProtocolError("the server answered with JSON that is no object")
    return data


def turn_info(data: Mapping[str, Any]) -> TurnInfo:
    """The ``leyline`` object of a reply. Raises `ProtocolError` where it is missing or wrong."""
    try:
        return TurnInfo.model_validate(data.get("leyline"))
    except pydantic.ValidationError as error:
        raise ProtocolError(f"the reply's leyline object is not the protocol's: {_first(error)}") from error


def _operation(session: str, name: str, expected_version: int | None, cache_salt: str | None) -> Call[TurnInfo]:
    body = {"expected_version": expected_version}
    content = json.dumps(body).encode()
    path = f"{_session_path(session)}/{name}"
    return Call(Request("POST", path, content, _JSON, _salt(cache_salt), DEFAULT_TIMEOUT), _model(TurnInfo))


def _session_path(session: str) -> str:
    if not session or not session.replace("-", "").replace("_", "").isalnum() or not session.isascii():
        raise ConfigurationError("a session id holds letters, digits, '-' and '_' only")
    return f"{PREFIX}/sessions/{session}"


def _salt(cache_salt: str | None) -> dict[str, str]:
    return {} if cache_salt is None else {"cache_salt": cache_salt}


_JSON = {"content-type": "application/json"}


def _post(name: str, body: Mapping[str, Any], timeout: Timeout, stream: bool = False) -> Request:
    try:
        content = json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the request cannot be written as JSON: {error}") from error
    return Request("POST", f"{PREFIX}/{name}", content, _JSON, timeout=timeout, stream=stream)


def _build(model: type[M], **fields: Any) -> M:
    try:
        return model(**fields)
    except pydantic.ValidationError as error:
        raise ConfigurationError(f"{model.__name__}: {_first(error)}") from error


def _model(model: type[M]) -> Callable[[Reply], M]:
    def parse(reply: Reply) -> M:
        try:
            return model.model_validate_json(reply.content)
        except pydantic.ValidationError as error:
            raise ProtocolError(f"the reply is no {model.__name__}: {_first(error)}") from error

    return parse


def _info(reply: Reply) -> ServerInfo:
    """Read the protocol's version first: another version may have other fields."""
    version = json_object(reply).get("protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the server speaks protocol {version!r}, this client {PROTOCOL_VERSION}: "
            "install the same release of leyline-client on both sides"
        )
    return _model(ServerInfo)(reply)


def _first(error: pydantic.ValidationError) -> str:
    """The first fault by place and kind, without the value: values may be prompt text."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the body"
    return f"{where}: {first['msg']}"
