"""What the commands share: errors that end a command in one line, the server's facts, and result files read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from leyline_client import LeylineClient, LeylineError, ServerInfo, TransportError
from leyline_evals.machine import machine_facts


class EvalError(Exception):
    """Ends a command; the message is all its user needs to read."""


class ServerDown(EvalError):
    """The server cannot be reached, or ended during the run."""


def server_info(base_url: str) -> ServerInfo:
    """The handshake.

    Raises:
        ServerDown: nobody answers.
        EvalError: the server has no extension, or the extension refuses to splice.
    """
    try:
        with LeylineClient(base_url, timeout=30.0) as client:
            info = client.info()
    except TransportError as error:
        raise ServerDown(f"no server at {base_url}: {error}") from error
    except LeylineError as error:
        raise EvalError(f"{base_url}: {error}") from error
    if not info.enabled:
        raise EvalError(f"{base_url}: the extension does not splice here: {'; '.join(info.refusals) or 'no reason'}")
    return info


def provenance(info: ServerInfo | None = None) -> dict[str, Any]:
    """When, with which versions and on what machine something is measured: the head of every result file."""
    facts = machine_facts()
    if info is not None:
        facts["server_versions"] = {"sglang": info.sglang_version, "extension": info.extension_version}
    return {"machine": facts}


def server_facts(base_url: str, info: ServerInfo) -> dict[str, Any]:
    """What of the server decides the figures."""
    return {
        "model": model_name(base_url, info),
        "context_length": info.context_length,
        "page_size": info.page_size,
        "kv_dtype": info.kv_dtype,
        "rope": info.rope.model_dump(mode="json") if info.rope else None,
    }


def model_name(base_url: str, info: ServerInfo) -> str:
    """The name of the served model's folder; the name it is served under where the engine does not tell."""
    try:
        reply = httpx.get(f"{base_url.rstrip('/')}/model_info", timeout=30.0, trust_env=False)
        path = reply.json().get("model_path") if reply.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError):
        path = None
    return Path(path if isinstance(path, str) and path else info.model).name


def read_json(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        EvalError: missing, damaged, or no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EvalError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise EvalError(f"{path}: no JSON: {error}") from error
    if not isinstance(data, dict):
        raise EvalError(f"{path}: a JSON object is expected")
    return data
