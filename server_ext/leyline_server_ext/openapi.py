"""What the OpenAPI document says of Leyline's routes: parameters, bodies, answers, errors.

The handlers validate bodies themselves, to name the field at fault in one kind of error; FastAPI only documents.
"""

from __future__ import annotations

from typing import Any

from leyline_client._errors import SERVER_ERRORS
from leyline_client._models import TurnInfo, TurnOptions
from leyline_client._wire import (
    PlanReply,
    RenderReply,
    RenderRequest,
    ServerInfo,
    SessionRequest,
    SessionView,
    SpliceReply,
    SpliceRequest,
    TokenizerInfo,
)

Schema = dict[str, Any]


def operations() -> dict[tuple[str, str], Schema]:
    """``(method, path)`` of every route under the prefix, with its OpenAPI operation."""
    session = "/sessions/{session_id}"
    moved: Schema = {"reply": _of(TurnInfo), "body": _of(SessionRequest), "required": False, "parameters": _SESSION}
    return {
        ("GET", "/info"): _operation(_of(ServerInfo)),
        ("GET", "/tokenizer"): _operation(_of(TokenizerInfo)),
        ("GET", "/tokenizer/{digest}"): _operation({"type": "object"}, parameters=[_path("digest")]),
        ("POST", "/render"): _operation(_of(RenderReply), _of(RenderRequest)),
        ("POST", "/plan"): _operation(_of(PlanReply), {"anyOf": [_chat_body(), _of(SpliceRequest)]}),
        ("POST", "/splice"): _operation(_of(SpliceReply), _of(SpliceRequest)),
        ("POST", "/chat/completions"): _operation(_chat_reply(), _chat_body()),
        ("GET", session): _operation(_of(SessionView), parameters=_SESSION),
        ("DELETE", session): _operation(None, parameters=_SESSION),
        ("POST", f"{session}/undo"): _operation(**moved),
        ("POST", f"{session}/purge"): _operation(**moved),
    }


def _path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


_SESSION = [
    _path("session_id"),
    {"name": "cache_salt", "in": "query", "required": False, "schema": {"type": "string"}},
]


def _operation(
    reply: Schema | None, body: Schema | None = None, *, required: bool = True, parameters: list[Schema] | None = None
) -> Schema:
    done = {"204": {"description": "Done"}} if reply is None else {"200": _json("Success", reply)}
    found: Schema = {"responses": {**done, "4XX": _json("Refused", _ERROR), "5XX": _json("Failed", _ERROR)}}
    if body is not None:
        found["requestBody"] = {"required": required, "content": {"application/json": {"schema": body}}}
    if parameters:
        found["parameters"] = parameters
    return found


def _json(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_ERROR: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["type", "code", "message", "param", "detail"],
                    "properties": {
                        "type": {"const": "leyline_error"},
                        "code": {"enum": sorted(SERVER_ERRORS)},
                        "message": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "detail": {"type": "object"},
                    },
                }
            },
        },
        {
            "description": "SGLang's own refusal of a chat body",
            "type": "object",
            "required": ["object", "message"],
            "properties": {"object": {"const": "error"}, "message": {"type": "string"}},
        },
    ]
}


def _chat_body() -> Schema:
    return {
        "type": "object",
        "required": ["messages"],
        "properties": {
            "model": {"type": "string"},
            "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
            "leyline": _of(TurnOptions),
        },
    }


def _chat_reply() -> Schema:
    return {
        "type": "object",
        "required": ["choices", "leyline"],
        "properties": {"choices": {"type": "array", "items": {"type": "object"}}, "leyline": _of(TurnInfo)},
    }


def _of(model: Any) -> Schema:
    """A model's schema with its local ``$defs`` written out (an inline OpenAPI schema has no place for them)."""
    schema: Schema = model.model_json_schema()
    definitions = schema.get("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return walk(definitions[node["$ref"].rpartition("/")[2]])
            return {name: walk(value) for name, value in node.items() if name != "$defs"}
        return [walk(value) for value in node] if isinstance(node, list) else node

    result: Schema = walk(schema)
    return result
