"""The routes against their own OpenAPI document: requests that follow it and requests that break it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

pytest.importorskip("sglang", reason="needs the server environment")
pytest.importorskip("schemathesis", reason="needs the server environment")

import schemathesis
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from leyline_client._errors import SERVER_ERRORS

pytestmark = [pytest.mark.server, pytest.mark.slow]

PREFIX = "/leyline/v1"
OPERATIONS = [
    ("GET", "/info"),
    ("GET", "/tokenizer"),
    ("GET", "/tokenizer/{digest}"),
    ("POST", "/render"),
    ("POST", "/plan"),
    ("POST", "/splice"),
    ("POST", "/chat/completions"),
    ("GET", "/sessions/{session_id}"),
    ("DELETE", "/sessions/{session_id}"),
    ("POST", "/sessions/{session_id}/undo"),
    ("POST", "/sessions/{session_id}/purge"),
]


@pytest.fixture(scope="module")
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    running = request.getfixturevalue("server_tiny_gqa")
    with httpx.Client(base_url=running.base_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def schema(http: httpx.Client) -> Any:
    return schemathesis.openapi.from_dict(http.get("/openapi.json").json())


def test_the_document_names_every_route(schema: Any) -> None:
    named = {(found.ok().method.upper(), found.ok().path) for found in schema.get_all_operations()}
    ours = {(method, path.removeprefix(PREFIX)) for method, path in named if path.startswith(PREFIX)}
    assert ours == set(OPERATIONS)


CASES = [
    pytest.param(method, path, mode, id=f"{method}{path}-{mode.value}")
    for method, path in OPERATIONS
    for mode in schemathesis.GenerationMode
    # Nothing can be wrong with a request that has no parameters, or any string for one.
    if path not in ("/info", "/tokenizer", "/tokenizer/{digest}") or mode is schemathesis.GenerationMode.POSITIVE
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_a_success_or_a_typed_refusal(
    http: httpx.Client, schema: Any, method: str, path: str, mode: Any
) -> None:
    before = pool(http)
    answers: list[int] = []

    @settings(
        max_examples=30,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schema[PREFIX + path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        reply = case.call(base_url=str(http.base_url), timeout=120)
        answers.append(reply.status_code)
        case.validate_response(reply, checks=[response_schema_conformance, status_code_conformance])
        if reply.status_code < 400:
            return
        assert reply.status_code < 500 or reply.status_code == 501, reply.text
        body = reply.json()
        if path == "/chat/completions" and "error" not in body:
            assert body["object"] == "error", "SGLang's own refusal"
            return
        assert body["error"]["code"] in SERVER_ERRORS
        assert body["error"]["message"]

    check()
    assert answers
    assert pool(http) == before


def pool(http: httpx.Client) -> tuple[int, int]:
    """Slots held and in all, with the cache emptied: what a request leaves behind would be missing."""
    http.post("/flush_cache", params={"timeout": 30}).raise_for_status()
    reply = http.post(f"{PREFIX}/splice", json={"append": [5], "sampling_params": {"max_new_tokens": 1}})
    counts = reply.json()["receipt"]["pool_before"]
    http.delete(f"{PREFIX}/sessions/{reply.json()['session']}").raise_for_status()
    return counts["free"] + counts["cached"], counts["held"]
